"""The public gRPC API over a Generator. Knows no scheduling and no HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeAlias

import grpc

from specsplit.core.codec.common import stats_to_pb
from specsplit.core.codec.gateway import event_to_pb, generate_request_from_pb, models_to_pb
from specsplit.core.errors import SpecsplitError
from specsplit.core.serving import abort
from specsplit.gateway.api.admission import admit, check_ids
from specsplit.gateway.request import AdmittedRequest, Generator
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.text.tokenizer import Tokenizer
from specsplit.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    def __init__(self, generator: Generator, tokenizer: Tokenizer, settings: GatewaySettings) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._settings = settings

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateEvent]:
        async with _errors_as_status(context):
            admitted = await self._admit(request, context)
            async with aclosing(self._generator.generate(admitted)) as events:
                async for event in events:
                    yield event_to_pb(event)

    async def _admit(self, request: gateway_pb2.GenerateRequest, context: Context) -> AdmittedRequest:
        """The work on a long prompt is done beside the event loop."""
        return await asyncio.to_thread(
            admit,
            generate_request_from_pb(request),
            tokenizer=self._tokenizer,
            limits=self._generator.limits(),
            model=self._generator.model(),
            default_k=self._settings.speculation_k,
            arrival_us=time.time_ns() // 1000,
            traceparent=_metadata(context, "traceparent"),
            trace_ratio=self._settings.trace_ratio,
        )

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: Context
    ) -> gateway_pb2.TokenizeReply:
        async with _errors_as_status(context):
            ids = await asyncio.to_thread(
                self._tokenizer.encode, request.text, add_special_tokens=request.add_special_tokens
            )
            return gateway_pb2.TokenizeReply(ids=ids)

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: Context
    ) -> gateway_pb2.DetokenizeReply:
        async with _errors_as_status(context):
            ids = tuple(request.ids)
            check_ids(ids, self._generator.limits(), field="ids")
            return gateway_pb2.DetokenizeReply(text=await asyncio.to_thread(self._tokenizer.decode, ids))

    async def Models(self, request: gateway_pb2.ModelsRequest, context: Context) -> gateway_pb2.ModelsReply:
        async with _errors_as_status(context):
            return models_to_pb([self._generator.model()])

    async def Stats(self, request: common_pb2.StatsRequest, context: Context) -> common_pb2.StatsReply:
        async with _errors_as_status(context):
            return stats_to_pb(self._generator.counters())


@asynccontextmanager
async def _errors_as_status(context: Context) -> AsyncIterator[None]:
    """Ends the call with the status of the error that leaves the block."""
    try:
        yield
    except SpecsplitError as error:
        if error.http_status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.exception("a call failed")
        await abort(context, error)
    except Exception:
        log.exception("a call failed")
        await abort(context, SpecsplitError("internal error"))


def _metadata(context: Context, key: str) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == key and isinstance(value, str):
            return value
    return ""
