"""What the gateway's spans say of requests and steps, and what they never say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_bench import bench
from trace_reader import Span, read_spans

from specsplit.core.trace_context import TraceContext, start_span
from specsplit.core.tracing import open_sink
from specsplit.core.types import (
    DraftBatchDone,
    Finished,
    NoDraftReason,
    Order,
    SamplingParams,
    StepDone,
    Usage,
    VerifierEvent,
)
from specsplit.gateway.records import RequestRecord, RowRecord, StepRecord
from specsplit.gateway.request import AdmittedRequest
from specsplit.gateway.text.tokenizer import Tokenizer
from specsplit.gateway.tracing import Tracing

CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
VERIFY_BATCH = start_span("", ratio=1)
DRAFT_BATCH = start_span("", ratio=1)
S = 10**9


def new_request(traceparent: str = CLIENT, **changes: Any) -> AdmittedRequest:
    request = AdmittedRequest(
        request_id=bytes(range(16)),
        order=Order(-3, 5, bytes(range(16))),
        prompt_ids=(1, 2, 3, 4),
        sampling=SamplingParams(max_tokens=20, seed=7, temperature=0.5, top_k=40, top_p=0.9),
        stop=("secret stop",),
        k=4,
        trace=start_span(traceparent, ratio=0),
        model="tiny",
        is_chat=True,
    )
    return dataclasses.replace(request, **changes)


def new_record(request: AdmittedRequest, **changes: Any) -> RequestRecord:
    record = RequestRecord(
        request=request,
        outcome="length",
        usage=Usage(4, 20, 2, 9, 30, 11, (6, 3, 2)),
        output_ids=tuple(range(20)),
        admitted_ns=100 * S,
        opened_ns=101 * S,
        first_token_ns=103 * S,
        ended_ns=110 * S,
        replicas=("10.0.0.1:50053", "10.0.0.2:50053"),
        drafter="ngram",
        num_opens=2,
        num_preempted=1,
        predicted_cached_tokens=0,
    )
    return dataclasses.replace(record, **changes)


def new_row(request: AdmittedRequest, **changes: Any) -> RowRecord:
    row = RowRecord(
        request,
        base_len=9,
        num_tokens=1,
        is_sampling=True,
        granted=4,
        drafted=3,
        accepted=2,
        committed=3,
        no_draft_reason=None,
    )
    return dataclasses.replace(row, **changes)


def new_step(*rows: RowRecord, **changes: Any) -> StepRecord:
    step = StepRecord(
        step_id=12,
        replica="10.0.0.1:50053",
        drafter="ngram",
        started_ns=200 * S,
        drafted_ns=201 * S,
        sent_ns=202 * S,
        answered_ns=208 * S,
        committed_ns=209 * S,
        draft_us=300,
        draft_traceparent=DRAFT_BATCH.traceparent,
        done=StepDone(12, (), 1, 2, 3, 4, 70, 8, 100, traceparent=VERIFY_BATCH.traceparent),
        rows=rows,
    )
    return dataclasses.replace(step, **changes)


Trace = Callable[..., list[Span]]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """The spans made of some records, read back from the file that they were exported to."""
    path = tmp_path / "traces.jsonl"

    def run(*records: StepRecord | RequestRecord, **options: Any) -> list[Span]:
        path.unlink(missing_ok=True)
        sink = open_sink("gateway", path)
        assert sink is not None
        tracing = Tracing(sink, **options)
        for record in records:
            if isinstance(record, StepRecord):
                tracing.stepped(record)
            else:
                tracing.admitted(record.request, at_ns=record.admitted_ns)
                tracing.ended(record)
        sink.close(timeout=30)
        return read_spans(path)

    return run


def ids(context: TraceContext) -> tuple[str, str]:
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


# --- requests ---------------------------------------------------------------------------------------------


def test_the_span_of_a_request_has_all_totals(trace: Trace) -> None:
    request = new_request()
    (span,) = trace(new_record(request))
    assert (span.trace_id, span.span_id) == ids(request.trace)
    assert f"00-{span.trace_id}-{span.parent_span_id}-01" == CLIENT
    assert (span.service, span.name, span.is_error) == ("specsplit-gateway", "chat tiny", False)
    assert (span.start_ns, span.end_ns) == (100 * S, 110 * S)
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "specsplit",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "specsplit.request_id": bytes(range(16)).hex(),
        "specsplit.outcome": "length",
        "specsplit.priority": -3,
        "specsplit.k": 4,
        "specsplit.steps": 9,
        "specsplit.drafted": 30,
        "specsplit.accepted": 11,
        "specsplit.accepted_by_position": (6, 3, 2),
        "specsplit.drafter": "ngram",
        "specsplit.cached_tokens": 2,
        "specsplit.predicted_cached_tokens": 0,
        "specsplit.replicas": ("10.0.0.1:50053", "10.0.0.2:50053"),
        "specsplit.opens": 2,
        "specsplit.preempted": 1,
        "specsplit.queue_us": 1_000_000,
        "specsplit.ttft_us": 3_000_000,
        "specsplit.decode_us": 7_000_000,
    }


@pytest.mark.parametrize("flags", ["00", "01"])
def test_it_is_there_sampled_or_not(trace: Trace, flags: str) -> None:
    request = new_request(CLIENT[:-2] + flags)
    assert request.trace.is_sampled is (flags == "01")
    spans = trace(new_step(new_row(request)), new_record(request))
    assert [span.name for span in spans if span.name == "chat tiny"] == ["chat tiny"]
    assert len(spans) == (4 if flags == "01" else 1)


def test_a_request_without_a_caller_is_a_root(trace: Trace) -> None:
    (span,) = trace(new_record(new_request("", is_chat=False)))
    assert (span.parent_span_id, span.name) == ("", "text_completion tiny")


@pytest.mark.parametrize("outcome", ["unavailable", "numeric_error", "protocol_error", "internal_error"])
def test_errors_are_errors(trace: Trace, outcome: str) -> None:
    record = new_record(new_request(), outcome=outcome, opened_ns=None, first_token_ns=None, drafter="")
    (span,) = trace(record)
    assert span.is_error
    assert span.attributes["error.type"] == span.attributes["specsplit.outcome"] == outcome
    absent = (
        "gen_ai.response.finish_reasons",
        "specsplit.queue_us",
        "specsplit.ttft_us",
        "specsplit.drafter",
    )
    assert not span.attributes.keys() & absent


def test_a_client_that_left_is_no_error(trace: Trace) -> None:
    (span,) = trace(new_record(new_request(), outcome="cancelled"))
    assert not span.is_error
    assert span.attributes["specsplit.outcome"] == "cancelled"
    assert not span.attributes.keys() & {"error.type", "gen_ai.response.finish_reasons"}


def test_it_says_why_nothing_was_drafted(trace: Trace) -> None:
    usage = Usage(4, 20, 0, 20, 0, 0, (), NoDraftReason.DRAFTER_AWAY)
    (span,) = trace(new_record(new_request(), usage=usage))
    assert span.attributes["specsplit.no_draft_reason"] == "drafter_away"
    assert span.attributes["specsplit.accepted_by_position"] == ()


@pytest.mark.parametrize(("seed", "said"), [(2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_a_seed_is_its_64_bits(trace: Trace, seed: int, said: int) -> None:
    (span,) = trace(new_record(new_request(sampling=SamplingParams(max_tokens=1, seed=seed))))
    assert span.attributes["gen_ai.request.seed"] == said
    assert "gen_ai.request.top_k" not in span.attributes  # off


# --- steps ------------------------------------------------------------------------------------------------


def test_a_step_has_a_draft_and_a_verification(trace: Trace) -> None:
    request = new_request()
    step, draft, verify = trace(new_step(new_row(request)))
    assert [s.name for s in (step, draft, verify)] == ["step", "draft", "verify"]
    assert {s.trace_id for s in (step, draft, verify)} == {ids(request.trace)[0]}
    assert step.parent_span_id == ids(request.trace)[1]
    assert draft.parent_span_id == verify.parent_span_id == step.span_id
    assert len({step.span_id, draft.span_id, verify.span_id}) == 3
    assert (step.start_ns, step.end_ns) == (200 * S, 209 * S)
    assert (draft.start_ns, draft.end_ns) == (200 * S, 201 * S)
    assert (verify.start_ns, verify.end_ns) == (202 * S, 208 * S)
    assert step.attributes == {
        "specsplit.step_id": 12,
        "specsplit.replica": "10.0.0.1:50053",
        "specsplit.drafter": "ngram",
        "specsplit.base_len": 9,
        "specsplit.num_tokens": 1,
        "specsplit.granted": 4,
        "specsplit.drafted": 3,
        "specsplit.accepted": 2,
        "specsplit.committed": 3,
        "specsplit.batch_rows": 8,
        "specsplit.batch_tokens": 70,
        "specsplit.queue_us": 1,
        "specsplit.forward_us": 2,
        "specsplit.sample_us": 3,
        "specsplit.idle_us": 4,
    }
    assert draft.attributes == {"specsplit.draft_us": 300}
    assert (draft.links, verify.links) == ((ids(DRAFT_BATCH),), (ids(VERIFY_BATCH),))


@pytest.mark.parametrize(
    "chunk", [{"num_tokens": 128, "is_sampling": False, "committed": 0}, {"num_tokens": 7, "committed": 1}]
)
def test_a_prefill_chunk_is_one_span(trace: Trace, chunk: dict[str, Any]) -> None:
    """Also the last one of a prompt, which samples the first token."""
    request = new_request()
    row = new_row(request, granted=0, drafted=0, accepted=0, **chunk)
    (span,) = trace(new_step(row, drafted_ns=None, draft_us=None, draft_traceparent=""))
    assert (span.name, span.parent_span_id) == ("prefill", ids(request.trace)[1])
    assert span.links == (ids(VERIFY_BATCH),)
    assert span.attributes["specsplit.num_tokens"] == chunk["num_tokens"]
    assert span.attributes["specsplit.committed"] == chunk["committed"]


def test_rows_without_drafts_say_why(trace: Trace) -> None:
    request = new_request()
    late = new_row(request, drafted=0, accepted=0, committed=1, no_draft_reason=NoDraftReason.DRAFTER_AWAY)
    off = dataclasses.replace(late, granted=0, no_draft_reason=NoDraftReason.OFF)
    spans = trace(new_step(late, off, draft_us=None, draft_traceparent=""))
    assert [span.name for span in spans] == ["step", "draft", "verify", "step", "verify"]
    assert spans[0].attributes["specsplit.no_draft_reason"] == "drafter_away"
    assert spans[3].attributes["specsplit.no_draft_reason"] == "off"
    assert (spans[1].attributes, spans[1].links) == ({}, ()), "the drafter did not answer"
    (step, _) = trace(new_step(off, drafter="", drafted_ns=None, draft_us=None, draft_traceparent=""))
    assert "specsplit.drafter" not in step.attributes


def test_only_sampled_rows_of_a_step_have_spans(trace: Trace) -> None:
    sampled, other = new_request(), new_request(CLIENT[:-2] + "00")
    spans = trace(new_step(new_row(other), new_row(sampled), new_row(other)))
    assert {span.trace_id for span in spans} == {ids(sampled.trace)[0]}
    assert len(spans) == 3
    assert trace(new_step(new_row(other))) == []


# --- texts ------------------------------------------------------------------------------------------------


def test_texts_are_recorded_only_on_demand(trace: Trace, tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    prompt, output = 'my "secret" prompt', "the secret réply"
    request = new_request(prompt_ids=tokenizer.encode(prompt, add_special_tokens=False))
    record = new_record(request, output_ids=tokenizer.encode(output, add_special_tokens=False))
    step = new_step(new_row(request))
    trace(step, record, dataclasses.replace(record, outcome="unavailable"))
    written = (tmp_path / "traces.jsonl").read_text()
    assert "secret" not in written
    assert "messages" not in written
    (span,) = trace(record, decode=tokenizer.decode)
    assert json.loads(span.attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": prompt}]}
    ]
    assert json.loads(span.attributes["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": output}], "finish_reason": "length"}
    ]


# --- the whole loop ---------------------------------------------------------------------------------------


async def test_spans_of_a_real_loop_add_up_to_the_usage(trace: Trace, tiny_model_dir: Path) -> None:
    """Steps of several requests, long prompts among them, with the contexts that the services send back."""
    usages: dict[str, Usage] = {}

    def verified(event: VerifierEvent) -> VerifierEvent:
        if isinstance(event, StepDone):
            return dataclasses.replace(event, traceparent=VERIFY_BATCH.traceparent)
        return event

    def drafted(_: Any, done: DraftBatchDone) -> DraftBatchDone:
        return dataclasses.replace(done, traceparent=DRAFT_BATCH.traceparent)

    async with bench(tiny_model_dir, max_prefill_tokens=16) as running:
        running.verifier.twist, running.drafter.twist = verified, drafted
        for number, num_prompt in enumerate((3, 40, 17)):
            request = new_request(
                request_id=bytes([number] * 16),
                order=Order(0, number, bytes([number] * 16)),
                prompt_ids=tuple(range(num_prompt)),
                trace=start_span(CLIENT, ratio=0),
                stop=(),
            )
            async for event in running.loop.generate(request):
                if isinstance(event, Finished):
                    usages[request.request_id.hex()] = event.usage
        running.reporter.flush()
        opened = {request.traceparent for request in running.verifier.opens}
        told = {row.traceparent for batch in running.drafter.batches for row in batch.rows} - {""}
        records = [*running.recorder.steps, *running.recorder.requests]
    spans = trace(*records)
    requests = [span for span in spans if span.name == "chat tiny"]
    assert {f"00-{span.trace_id}-{span.span_id}-01" for span in requests} == opened == told
    assert {f"00-{span.trace_id}-{span.parent_span_id}-01" for span in requests} == {CLIENT}
    for span in requests:
        usage = usages[span.attributes["specsplit.request_id"]]
        children = [s for s in spans if s.parent_span_id == span.span_id]
        assert {s.trace_id for s in children} == {span.trace_id}
        for name, total in (
            ("committed", usage.completion_tokens),
            ("drafted", usage.drafted),
            ("accepted", usage.accepted),
        ):
            assert sum(s.attributes[f"specsplit.{name}"] for s in children) == total, name
        assert usage.drafted > 0
        assert sum(s.attributes["specsplit.committed"] > 0 for s in children) == usage.steps
        chunks = [s for s in children if s.attributes["specsplit.base_len"] == usage.prompt_tokens]
        assert sum(s.attributes["specsplit.num_tokens"] for s in chunks) == usage.prompt_tokens
        assert len(chunks) == -(-usage.prompt_tokens // 16)
        # a chunk of one token that samples is a step like any other
        assert {s.name for s in chunks if s.attributes["specsplit.num_tokens"] > 1} == {"prefill"}
        for child in children:
            assert span.start_ns <= child.start_ns < child.end_ns <= span.end_ns
            parts = [s for s in spans if s.parent_span_id == child.span_id]
            assert all(child.start_ns <= s.start_ns <= s.end_ns <= child.end_ns for s in parts)
            if child.name == "step":
                names = ["draft", "verify"] if child.attributes["specsplit.granted"] else ["verify"]
                assert [s.name for s in parts] == names
                links = {"draft": (ids(DRAFT_BATCH),), "verify": (ids(VERIFY_BATCH),)}
                assert all(s.links == links[s.name] for s in parts)
