"""A drafter service on a real aio server, and clients that keep a request's tokens as a gateway does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from specsplit.core.codec import common as common_codec
from specsplit.core.codec import drafter as codec
from specsplit.core.digest import TokenDigest
from specsplit.core.serving import open_channel
from specsplit.core.tracing import SpanSink
from specsplit.core.types import (
    CloseDraft,
    DraftBatch,
    DraftBatchDone,
    DraftRow,
    DraftRowDone,
    new_request_id,
)
from specsplit.drafter.ngram import NgramProposer
from specsplit.drafter.service import DrafterService
from specsplit.v1 import common_pb2, drafter_pb2_grpc


@dataclass
class Sequenced:
    """One request as its gateway sees it: committed ids, and how many of them the drafter was told."""

    ids: list[int]
    request_id: bytes = field(default_factory=new_request_id)
    generation: int = 1
    told: int = 0

    def row(self, max_draft: int = 4, **changes: Any) -> DraftRow:
        row = DraftRow(
            request_id=self.request_id,
            generation=self.generation,
            base_len=len(self.ids),
            digest=TokenDigest(self.ids).value,
            new_ids=tuple(self.ids[self.told :]),
            max_draft=max_draft,
        )
        self.told = len(self.ids)
        return replace(row, **changes)


class Stream:
    """One Run call."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Run()
        self._batch_id = 0

    async def send(self, command: DraftBatch | CloseDraft) -> None:
        await self.call.write(codec.command_to_pb(command))

    async def ask(self, *rows: DraftRow) -> tuple[DraftRowDone, ...]:
        self._batch_id += 1
        await self.send(DraftBatch(self._batch_id, rows))
        done = await self.read()
        assert done.batch_id == self._batch_id
        for row, answer in zip(rows, done.rows, strict=True):
            assert (row.request_id, row.generation, row.base_len) == (
                answer.request_id,
                answer.generation,
                answer.base_len,
            )
        return done.rows

    async def read(self) -> DraftBatchDone:
        pb = await self.call.read()
        assert pb is not grpc.aio.EOF, await self.call.code()
        return codec.batch_done_from_pb(pb)

    async def finish(self) -> None:
        """Half-closes and waits for the server to end the stream."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF
        assert await self.call.code() is grpc.StatusCode.OK


class Client:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = drafter_pb2_grpc.DrafterStub(channel)
        self.streams: list[Stream] = []

    def stream(self) -> Stream:
        self.streams.append(Stream(self.stub))
        return self.streams[-1]

    async def stats(self) -> dict[str, int]:
        return common_codec.stats_from_pb(await self.stub.Stats(common_pb2.StatsRequest(), timeout=10))

    async def stats_when(self, **wanted: int) -> dict[str, int]:
        """Asks until the levels are as wanted; the test's own timeout bounds it."""
        while True:
            stats = await self.stats()
            if all(stats[name] == value for name, value in wanted.items()):
                return stats


StartDrafter = Callable[..., Any]


@pytest.fixture
async def start_drafter() -> AsyncIterator[StartDrafter]:
    async with AsyncExitStack() as stack:

        async def start(
            *,
            min_n: int = 2,
            max_n: int = 5,
            max_context_tokens: int = 1 << 20,
            idle_seconds: float = 600.0,
            metrics: CollectorRegistry | None = None,
            spans: SpanSink | None = None,
        ) -> tuple[Client, str]:
            service = DrafterService(
                NgramProposer(min_n=min_n, max_n=max_n),
                max_context_tokens=max_context_tokens,
                idle_seconds=idle_seconds,
                metrics=metrics,
                spans=spans,
            )
            server = grpc.aio.server()
            drafter_pb2_grpc.add_DrafterServicer_to_server(service, server)  # type: ignore[no-untyped-call]
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            await service.start()
            stack.push_async_callback(server.stop, grace=0)
            stack.push_async_callback(service.close)
            channel = open_channel(f"127.0.0.1:{port}")
            stack.push_async_callback(channel.close)
            client = Client(channel)

            async def cancel_streams() -> None:
                for stream in client.streams:
                    stream.call.cancel()

            stack.push_async_callback(cancel_streams)
            return client, f"127.0.0.1:{port}"

        yield start


@pytest.fixture
async def client(start_drafter: StartDrafter) -> Client:
    started: Client = (await start_drafter())[0]
    return started


@pytest.fixture
def sequence() -> Callable[[Sequence[int]], Sequenced]:
    return lambda ids, **fields: Sequenced(list(ids), **fields)
