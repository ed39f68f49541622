"""The drafter's spans: one for each batch with a sampled request, linked to it, and named in the answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_reader import read_spans

from specsplit.core.trace_context import TraceContext, start_span
from specsplit.core.tracing import SpanSink, open_sink
from specsplit.core.types import DraftBatch, DraftBatchDone, DraftRow

LOOP = (1, 2, 3, 1, 2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.jsonl"


@pytest.fixture
def spans(path: Path) -> SpanSink:
    sink = open_sink("drafter", path)
    assert sink is not None
    return sink


async def ask(stream: Any, batch_id: int, *rows: DraftRow) -> DraftBatchDone:
    await stream.send(DraftBatch(batch_id, rows))
    done: DraftBatchDone = await stream.read()
    return done


def ids(context: TraceContext) -> tuple[str, str]:
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


async def test_a_batch_is_linked_to_its_sampled_requests(
    start_drafter: Callable[..., Any], sequence: Callable[..., Any], spans: SpanSink, path: Path
) -> None:
    """The context comes with a generation's first row and holds for all that follow."""
    client, _ = await start_drafter(spans=spans)
    stream = client.stream()
    sampled, other, unnamed = (sequence(LOOP) for _ in range(3))
    trace, untraced = start_span("", ratio=1), start_span("", ratio=0)
    first = await ask(
        stream,
        1,
        other.row(traceparent=untraced.traceparent),
        sampled.row(traceparent=trace.traceparent),
        unnamed.row(),
    )
    sampled.ids.append(3)
    second = await ask(stream, 2, sampled.row())
    unnamed.ids.append(3)
    third = await ask(stream, 3, unnamed.row())
    sampled.told -= 1
    fourth = await ask(stream, 4, sampled.row(), other.row(max_draft=0))  # refused: that was told before
    spans.close(timeout=30)
    batches = read_spans(path)
    assert [span.name for span in batches] == ["draft batch"] * 2
    for span, done in zip(batches, (first, second), strict=True):
        assert done.traceparent == f"00-{span.trace_id}-{span.span_id}-01"
        assert span.parent_span_id == ""
        assert span.links == (ids(trace),)
        assert span.service == "specsplit-drafter"
        assert span.start_ns < span.end_ns
    assert batches[0].trace_id != batches[1].trace_id
    incarnation = batches[0].attributes["specsplit.incarnation"]
    assert [span.attributes for span in batches] == [
        {
            "specsplit.drafter": "ngram",
            "specsplit.batch_rows": len(done.rows),
            "specsplit.drafted": sum(len(row.draft_ids) for row in done.rows),
            "specsplit.need_context": 0,
            "specsplit.draft_us": done.draft_us,
            "specsplit.incarnation": incarnation,
        }
        for done in (first, second)
    ]
    assert batches[0].attributes["specsplit.drafted"] == 12
    assert third.traceparent == fourth.traceparent == ""


async def test_a_new_generation_brings_its_own_context(
    start_drafter: Callable[..., Any], sequence: Callable[..., Any], spans: SpanSink, path: Path
) -> None:
    client, _ = await start_drafter(spans=spans)
    stream = client.stream()
    request = sequence(LOOP)
    contexts = [start_span("", ratio=1), start_span("", ratio=1), start_span("", ratio=0)]
    for number, context in enumerate(contexts):
        request.told, request.generation = 0, number + 1
        await ask(stream, number + 1, request.row(traceparent=context.traceparent))
    spans.close(timeout=30)
    assert [span.links for span in read_spans(path)] == [(ids(contexts[0]),), (ids(contexts[1]),)]


@pytest.mark.parametrize("traceparent", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_no_context_no_span(
    traceparent: str,
    start_drafter: Callable[..., Any],
    sequence: Callable[..., Any],
    spans: SpanSink,
    path: Path,
) -> None:
    client, _ = await start_drafter(spans=spans)
    done = await ask(client.stream(), 1, sequence(LOOP).row(traceparent=traceparent))
    spans.close(timeout=30)
    assert (done.traceparent, read_spans(path)) == ("", [])


async def test_without_a_destination_nothing_is_named(client: Any, sequence: Callable[..., Any]) -> None:
    trace = start_span("", ratio=1)
    done = await ask(client.stream(), 1, sequence(LOOP).row(traceparent=trace.traceparent))
    assert done.traceparent == ""
