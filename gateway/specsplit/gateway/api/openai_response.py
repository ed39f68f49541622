"""Runs the generations of one HTTP request and sends them as OpenAI's response. Knows no routes.

Nothing is sent before every generation has started, so that a refusal still gets its own status. A client
that goes away cancels them at once, whatever they are waiting for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import assert_never

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from specsplit.core.errors import SpecsplitError
from specsplit.core.types import Delta, Finished, GenerateEvent, Started, Usage
from specsplit.gateway.api.http_errors import error_json
from specsplit.gateway.api.openai_fields import Json
from specsplit.gateway.api.openai_render import Shape, merge_deltas, usage_json
from specsplit.gateway.request import AdmittedRequest, Generator

log = logging.getLogger(__name__)

IndexedEvent = tuple[int, GenerateEvent]


@dataclass(slots=True)
class _Choice:
    """What is known of one generation."""

    started: Started | None = None
    deltas: list[Delta] = field(default_factory=list)
    finished: Finished | None = None


class GenerationResponse(Response):
    def __init__(
        self,
        generator: Generator,
        requests: Sequence[AdmittedRequest],
        shape: Shape,
        *,
        is_streamed: bool,
        is_usage_streamed: bool,
    ) -> None:
        self._generator = generator
        self._requests = requests
        self._shape = shape
        self._is_streamed = is_streamed
        self._is_usage_streamed = is_usage_streamed
        self._id = f"{shape.id_prefix}{requests[0].request_id.hex()}"
        self._created = int(time.time())
        self._model = generator.model().id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(scope, receive, send))
        leaving = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not sending.done():
                sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(generate_all(self._generator, self._requests)) as events:
            if self._is_streamed:
                await self._stream(events, send)
            else:
                body = await self._whole(events)
                await JSONResponse(body)(scope, receive, send)

    async def _whole(self, events: AsyncGenerator[IndexedEvent, None]) -> Json:
        choices = [_Choice() for _ in self._requests]
        async for index, event in events:
            match event:
                case Started():
                    choices[index].started = event
                case Delta():
                    choices[index].deltas.append(event)
                case Finished():
                    choices[index].finished = event
                case _:
                    assert_never(event)
        rendered, usages, head = [], list[Usage](), Json()
        for index, choice in enumerate(choices):
            assert choice.started is not None
            assert choice.finished is not None
            output, reason = merge_deltas(choice.deltas), choice.finished.finish_reason
            rendered.append(self._shape.whole(index, choice.started, output, reason))
            usages.append(choice.finished.usage)
            head = head or self._shape.head(choice.started)
        return self._envelope(self._shape.object, rendered) | {"usage": usage_json(usages)} | head

    async def _stream(self, events: AsyncGenerator[IndexedEvent, None], send: Send) -> None:
        early = await _until_all_started(events, len(self._requests))
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                ],
            }
        )
        usages: list[Usage] = []
        try:
            for index, event in early:
                await self._send_event(index, event, usages, send)
            async for index, event in events:
                await self._send_event(index, event, usages, send)
        except Exception as error:
            if not isinstance(error, SpecsplitError) or error.http_status == 500:
                log.exception("a streamed request failed")
            await _send_data(send, json.dumps(error_json(error)))
        else:
            if self._is_usage_streamed:
                chunk = self._envelope(self._shape.chunk_object, [])
                await _send_chunk(send, chunk | {"usage": usage_json(usages)})
            await _send_data(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, index: int, event: GenerateEvent, usages: list[Usage], send: Send) -> None:
        head: Json = {}
        match event:
            case Started():
                choice = self._shape.started(index, event)
                head = self._shape.head(event)
            case Delta():
                choice = self._shape.delta(index, event)
            case Finished():
                usages.append(event.usage)
                choice = self._shape.finished(index, event.finish_reason)
            case _:
                assert_never(event)
        if choice is None:
            return
        chunk = self._envelope(self._shape.chunk_object, [choice]) | head
        await _send_chunk(send, chunk | {"usage": None} if self._is_usage_streamed else chunk)

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
            "choices": choices,
        }


async def generate_all(
    generator: Generator, requests: Sequence[AdmittedRequest]
) -> AsyncGenerator[IndexedEvent, None]:
    """The events of all requests as they come, with the request's index; the first error ends all of them."""
    if len(requests) == 1:
        async with aclosing(generator.generate(requests[0])) as events:
            async for event in events:
                yield 0, event
        return
    # One slot: a client that reads slowly slows its own generations, not the server's memory.
    merged: asyncio.Queue[IndexedEvent | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(index: int, request: AdmittedRequest) -> None:
        try:
            async with aclosing(generator.generate(request)) as events:
                async for event in events:
                    await merged.put((index, event))
            await merged.put(None)
        except Exception as error:
            await merged.put(error)

    tasks = [asyncio.ensure_future(pump(index, request)) for index, request in enumerate(requests)]
    try:
        num_running = len(tasks)
        while num_running:
            item = await merged.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_all_started(
    events: AsyncGenerator[IndexedEvent, None], num_requests: int
) -> list[IndexedEvent]:
    early: list[IndexedEvent] = []
    while sum(isinstance(event, Started) for _, event in early) < num_requests:
        early.append(await anext(events))
    return early


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_chunk(send: Send, chunk: Json) -> None:
    await _send_data(send, json.dumps(chunk, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


async def _send_data(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
