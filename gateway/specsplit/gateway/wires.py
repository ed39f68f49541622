"""The two streams of the gateway, verifier's and drafter's, for `Link`. Knows stubs and codec only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from specsplit.core.codec import drafter as drafter_codec
from specsplit.core.codec import verifier as verifier_codec
from specsplit.core.types import (
    DraftBatchDone,
    DraftCommand,
    DrafterDescription,
    VerifierCommand,
    VerifierDescription,
    VerifierEvent,
)
from specsplit.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

DESCRIBE_SECONDS = 5.0


class VerifierWire:
    async def describe(self, channel: grpc.aio.Channel) -> VerifierDescription:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        request = verifier_pb2.DescribeVerifierRequest()
        return verifier_codec.description_from_pb(
            await stub.Describe(request, timeout=DESCRIBE_SECONDS, wait_for_ready=True)
        )

    def open(self, channel: grpc.aio.Channel, commands: AsyncIterator[Any]) -> Any:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        return stub.Run(commands)

    def encode(self, command: VerifierCommand) -> verifier_pb2.VerifierCommand:
        return verifier_codec.command_to_pb(command)

    def decode(self, event: verifier_pb2.VerifierEvent) -> VerifierEvent:
        return verifier_codec.event_from_pb(event)


class DrafterWire:
    async def describe(self, channel: grpc.aio.Channel) -> DrafterDescription:
        stub = drafter_pb2_grpc.DrafterStub(channel)
        request = drafter_pb2.DescribeDrafterRequest()
        return drafter_codec.description_from_pb(
            await stub.Describe(request, timeout=DESCRIBE_SECONDS, wait_for_ready=True)
        )

    def open(self, channel: grpc.aio.Channel, commands: AsyncIterator[Any]) -> Any:
        stub = drafter_pb2_grpc.DrafterStub(channel)
        return stub.Run(commands)

    def encode(self, command: DraftCommand) -> drafter_pb2.DraftCommand:
        return drafter_codec.command_to_pb(command)

    def decode(self, event: drafter_pb2.DraftBatchDone) -> DraftBatchDone:
        return drafter_codec.batch_done_from_pb(event)
