"""The verifier's spans: one for each batch with a sampled request, linked to it, and named in the answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from trace_reader import Span, read_spans

from specsplit.core.codec import verifier
from specsplit.core.serving import open_channel
from specsplit.core.trace_context import TraceContext, start_span
from specsplit.core.tracing import SpanSink, open_sink
from specsplit.core.types import (
    Opened,
    SamplingParams,
    Status,
    Step,
    StepDone,
    StepRow,
    VerifierDescription,
)
from specsplit.v1 import common_pb2, verifier_pb2_grpc
from specsplit.verifier.device import Loaded
from specsplit.verifier.service import VerifierService

SAMPLING = SamplingParams(max_tokens=12, seed=3, temperature=0.8, ignore_eos=True)
PROMPT = tuple(range(40))
INCARNATION = bytes(range(16))


class Stream:
    """A gateway's stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = verifier_pb2_grpc.VerifierStub(channel)
        self.call = self.stub.Run()

    async def send(self, command: Any) -> None:
        await self.call.write(verifier.command_to_pb(command))

    async def next(self, kind: type) -> Any:
        while not isinstance(event := verifier.event_from_pb(await self.call.read()), kind):
            pass
        return event

    async def open(self, client: Any, traceparent: str) -> None:
        await self.send(replace(client.open_request(), traceparent=traceparent))
        opened = await self.next(Opened)
        assert opened.status is Status.OK
        client.num_computed = opened.cached_tokens

    async def step(self, step_id: int, *rows: StepRow) -> StepDone:
        await self.send(Step(step_id, rows))
        done: StepDone = await self.next(StepDone)
        return done


Serve = Callable[..., Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.jsonl"


@pytest.fixture
def spans(path: Path) -> SpanSink:
    sink = open_sink("verifier", path)
    assert sink is not None
    return sink


@pytest.fixture
def serve(kit: Any) -> Serve:
    """A service on a real server: a function that opens streams, the scripted model, the service."""

    @asynccontextmanager
    async def running(
        spans: SpanSink | None,
    ) -> AsyncIterator[tuple[Callable[[], Stream], Any, VerifierService]]:
        core, model = kit.core()
        description = VerifierDescription(
            *("scripted", "", "float32", "test", "", core.limits.vocab_size, 256, 16, 64, 512, 64),
            *(INCARNATION, bytes(8), (7,)),
        )
        service = VerifierService(
            lambda: Loaded(core, description), max_steps_in_flight=2, on_failure=lambda: None, spans=spans
        )
        server = grpc.aio.server()
        verifier_pb2_grpc.add_VerifierServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await service.start()
        try:
            async with open_channel(f"127.0.0.1:{port}") as channel:
                yield lambda: Stream(channel), model, service
        finally:
            await service.close()
            await server.stop(None)

    return running


def ids(context: TraceContext) -> tuple[str, str]:
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def context_of(span: Span) -> str:
    return f"00-{span.trace_id}-{span.span_id}-01"


async def test_a_batch_is_linked_to_its_sampled_requests(
    kit: Any, serve: Serve, spans: SpanSink, path: Path
) -> None:
    trace = start_span("", ratio=1)
    sampled, other = kit.client(PROMPT, SAMPLING), kit.client(PROMPT[:7], SAMPLING)
    async with serve(spans) as (new_stream, *_):
        stream = new_stream()
        await stream.open(sampled, trace.traceparent)
        await stream.open(other, start_span("", ratio=0).traceparent)
        chunk = await stream.step(1, sampled.row(chunk=16))
        sampled.take(chunk.rows[0])
        alone = await stream.step(2, other.row())
        other.take(alone.rows[0])
        both = await stream.step(3, other.row(), sampled.row())
        replayed = await stream.step(4, other.row(), sampled.row())
        nothing = await stream.step(5)
    spans.close(timeout=30)
    batches = read_spans(path)
    assert [context_of(span) for span in batches] == [chunk.traceparent, both.traceparent]
    assert alone.traceparent == replayed.traceparent == nothing.traceparent == ""
    for span, done in zip(batches, (chunk, both), strict=True):
        assert (span.name, span.service, span.parent_span_id) == ("verify batch", "specsplit-verifier", "")
        assert span.links == (ids(trace),)
        assert span.end_ns - span.start_ns >= (done.forward_us + done.sample_us) * 1000
        assert span.attributes == {
            "specsplit.incarnation": INCARNATION.hex(),
            "specsplit.batch_steps": 1,
            "specsplit.batch_rows": done.batch_rows,
            "specsplit.batch_tokens": done.batch_tokens,
            "specsplit.queue_us": done.queue_us,
            "specsplit.forward_us": done.forward_us,
            "specsplit.sample_us": done.sample_us,
            "specsplit.idle_us": done.idle_us,
        }
    assert [span.attributes["specsplit.batch_tokens"] for span in batches] == [16, 1 + 24]


async def test_steps_of_two_gateways_in_one_batch_name_the_same_span(
    kit: Any, serve: Serve, spans: SpanSink, path: Path
) -> None:
    traces = [start_span("", ratio=1) for _ in range(2)]
    clients = [kit.client((number, *PROMPT), SAMPLING) for number in range(3)]
    is_running, may_end = threading.Event(), threading.Event()
    async with serve(spans) as (new_stream, model, service):
        blocker, *streams = (new_stream() for _ in range(3))
        for stream, client, trace in zip((blocker, *streams), clients, ("", *traces), strict=True):
            await stream.open(client, trace and trace.traceparent)
        model.before_step = lambda: (is_running.set(), may_end.wait())
        await blocker.send(Step(1, (clients[0].row(),)))
        await asyncio.to_thread(is_running.wait)
        for stream, client in zip(streams, clients[1:], strict=True):
            await stream.send(Step(7, (client.row(),)))
        while service._device._inbox.qsize() < 2:  # both have reached the device's inbox
            await blocker.stub.Stats(common_pb2.StatsRequest())
        may_end.set()
        done = [await stream.next(StepDone) for stream in streams]
    spans.close(timeout=30)
    (batch,) = read_spans(path)
    assert [d.traceparent for d in done] == [context_of(batch)] * 2
    assert sorted(batch.links) == sorted(map(ids, traces))
    assert batch.attributes["specsplit.batch_steps"] == 2
    assert batch.attributes["specsplit.queue_us"] == max(d.queue_us for d in done)


async def test_a_failed_batch_has_its_span(kit: Any, serve: Serve, spans: SpanSink, path: Path) -> None:
    client = kit.client(PROMPT, SAMPLING)
    async with serve(spans) as (new_stream, model, _):
        stream = new_stream()
        await stream.open(client, start_span("", ratio=1).traceparent)
        model.failing_ids = {PROMPT[0]}
        done = await stream.step(1, client.row())
        assert [row.status for row in done.rows] == [Status.INTERNAL]
    spans.close(timeout=30)
    assert [context_of(span) for span in read_spans(path)] == [done.traceparent]


@pytest.mark.parametrize("has_destination", [True, False])
async def test_no_destination_or_no_context_no_span(
    has_destination: bool, kit: Any, serve: Serve, spans: SpanSink, path: Path
) -> None:
    client = kit.client(PROMPT, SAMPLING)
    async with serve(spans if has_destination else None) as (new_stream, *_):
        stream = new_stream()
        await stream.open(client, "garbage" if has_destination else start_span("", ratio=1).traceparent)
        done = await stream.step(1, client.row())
    spans.close(timeout=30)
    assert (done.traceparent, read_spans(path)) == ("", [])
