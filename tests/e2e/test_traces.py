"""What the trace file and the metrics say, compared with what the clients were told."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from stack_harness import Client, Result, Stack
from trace_reader import Span

from specsplit.core.types import GenerateRequest, NoDraftReason, Speculation, Usage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

REPETITIVE = "one two three one two three one two three one two three one two"


@pytest.fixture(scope="module")
def traced(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Details are kept only where the caller asks for them; a request waits a second for a lost verifier."""
    stack = Stack(
        tmp_path_factory.mktemp("traced"),
        *("--model", str(tiny_model_dir), "--num-blocks", "256", "--trace-ratio", "0"),
        env={"SPECSPLIT_GATEWAY_VERIFIER_WAIT_SECONDS": "1"},
    )
    yield stack
    assert stack.stop() == 0


class Caller:
    """A client that is part of a trace."""

    def __init__(self, *, is_sampled: bool) -> None:
        self.trace_id = secrets.token_hex(16)
        self.span_id = secrets.token_hex(8)
        self.traceparent = f"00-{self.trace_id}-{self.span_id}-{int(is_sampled):02x}"


def request_spans(spans: list[Span]) -> dict[str, Span]:
    """By trace id; a caller's trace has one request."""
    found = [span for span in spans if "specsplit.outcome" in span.attributes]
    by_trace = {span.trace_id: span for span in found}
    assert len(by_trace) == len(found)
    return by_trace


def links_to(span: Span, other: Span) -> bool:
    return (other.trace_id, other.span_id) in span.links


def usage_of(span: Span) -> Usage:
    attributes = span.attributes
    reason = attributes.get("specsplit.no_draft_reason")
    return Usage(
        prompt_tokens=attributes["gen_ai.usage.input_tokens"],
        completion_tokens=attributes["gen_ai.usage.output_tokens"],
        cached_tokens=attributes["specsplit.cached_tokens"],
        steps=attributes["specsplit.steps"],
        drafted=attributes["specsplit.drafted"],
        accepted=attributes["specsplit.accepted"],
        accepted_by_position=attributes["specsplit.accepted_by_position"],
        no_draft_reason=None if reason is None else NoDraftReason[reason.upper()],
    )


async def over_http(stack: Stack, caller: Caller) -> tuple[int, int, int]:
    async with httpx.AsyncClient(base_url=stack.http) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": model, "prompt": REPETITIVE, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        reply = await http.post("/v1/completions", json=body, headers={"traceparent": caller.traceparent})
        usage = reply.json()["usage"]
        return usage["speculation"]["steps"], usage["speculation"]["drafted"], usage["completion_tokens"]


async def over_grpc(stack: Stack, caller: Caller) -> tuple[int, int, int]:
    async with Client(stack) as client:
        request = GenerateRequest(prompt=REPETITIVE, max_tokens=60, temperature=0.0, ignore_eos=True)
        usage = (await client.generate(request, traceparent=caller.traceparent)).usage
        assert usage is not None
        return usage.steps, usage.drafted, usage.completion_tokens


Call = Callable[[Stack, Caller], Awaitable[tuple[int, int, int]]]


@pytest.mark.parametrize("call", [over_http, over_grpc])
async def test_a_callers_trace_reaches_a_step_in_each_service(traced: Stack, call: Call) -> None:
    caller = Caller(is_sampled=True)
    steps, drafted, completion_tokens = await call(traced, caller)
    assert drafted > 0

    def is_complete(spans: list[Span]) -> bool:
        linking = {s.service for s in spans if any(trace_id == caller.trace_id for trace_id, _ in s.links)}
        return caller.trace_id in request_spans(spans) and linking >= {
            "specsplit-drafter",
            "specsplit-verifier",
        }

    spans = await asyncio.to_thread(traced.wait_spans, is_complete, "a span of each service")
    own = [span for span in spans if span.trace_id == caller.trace_id]
    request = request_spans(own)[caller.trace_id]
    assert request.parent_span_id == caller.span_id
    rows = [span for span in own if span.parent_span_id == request.span_id]
    assert {span.name for span in rows} == {"prefill", "step"}
    assert sum(row.attributes["specsplit.committed"] for row in rows) == completion_tokens
    assert sum(row.attributes["specsplit.drafted"] for row in rows) == drafted
    assert len([row for row in rows if row.attributes["specsplit.committed"]]) == steps
    for row in rows:
        assert request.start_ns <= row.start_ns <= row.end_ns <= request.end_ns

    for service, name in (("specsplit-verifier", "verify"), ("specsplit-drafter", "draft")):
        batches = {
            (span.trace_id, span.span_id): span for span in spans if span.service == service and span.links
        }
        children = [span for span in own if span.name == name]
        linked = [(child, batches[link]) for child in children for link in child.links if link in batches]
        assert linked
        for child, batch in linked:
            assert links_to(batch, request)
            assert child.start_ns <= batch.start_ns <= batch.end_ns <= child.end_ns
    assert len([span for span in own if span.name == "verify"]) == len(rows) - len(
        [row for row in rows if row.name == "prefill"]
    )


async def failed_request(stack: Stack, client: Client, caller: Caller) -> None:
    """No verifier takes it: that was killed, and nobody starts its successor."""
    stack.process.send_signal(signal.SIGSTOP)
    try:
        pid = stack.kill("verifier")
        await asyncio.to_thread(
            stack.wait_stats, "gateway", lambda s: s["verifier_up"] == 0, "the verifier's end"
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.generate(GenerateRequest(prompt="abc"), traceparent=caller.traceparent)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        stack.process.send_signal(signal.SIGCONT)
    await asyncio.to_thread(stack.wait_replaced, pid)
    await asyncio.to_thread(stack.wait_stats, "gateway", lambda s: s["verifier_up"] == 1, "its successor")


async def test_totals_of_the_trace_file_equal_the_usage_of_all_responses(traced: Stack) -> None:
    rng = random.Random(11)
    text = REPETITIVE.encode()
    requests = [
        GenerateRequest(
            prompt=(*text[: rng.randrange(1, len(text))], *(rng.randrange(250) for _ in range(i % 9))),
            max_tokens=180 if i % 8 == 7 else rng.randrange(1, 100),
            ignore_eos=True,
            temperature=0.0 if i % 2 else 0.8,
            seed=i,
            stop=(" t",) if i % 5 == 0 else (),
            speculation=Speculation(k=(0, 1, 4, 8)[i % 4]),
        )
        for i in range(32)
    ]
    callers = [Caller(is_sampled=False) for _ in requests]
    async with Client(traced) as client:
        before = traced.metrics("gateway")
        results = await asyncio.gather(
            *(
                client.generate(
                    request, cancel_after=3 if i % 8 == 7 else None, traceparent=caller.traceparent
                )
                for i, (request, caller) in enumerate(zip(requests, callers, strict=True))
            )
        )
        await asyncio.to_thread(traced.wait_stats, "gateway", lambda s: s["requests"] == 0, "an empty table")
        after = traced.metrics("gateway")
        failed = Caller(is_sampled=False)
        await failed_request(traced, client, failed)

    wanted = {caller.trace_id for caller in [*callers, failed]}
    spans = await asyncio.to_thread(
        traced.wait_spans, lambda spans: request_spans(spans).keys() >= wanted, "a span of each request"
    )
    assert len([span for span in spans if span.trace_id in wanted]) == len(wanted), (
        "details that nobody wanted"
    )
    by_trace = request_spans(spans)
    finished: list[tuple[Span, Result]] = []
    num_cancelled = 0
    for caller, result in zip(callers, results, strict=True):
        span = by_trace[caller.trace_id]
        assert not span.is_error
        if result.usage is None:
            num_cancelled += span.attributes["specsplit.outcome"] == "cancelled"  # else it was too late
            assert span.attributes["gen_ai.usage.output_tokens"] >= len(result.ids)
        else:
            finished.append((span, result))
            assert span.attributes["specsplit.outcome"] == result.finish_reason
            assert usage_of(span) == result.usage
    assert num_cancelled >= 2
    assert len(finished) >= 28
    assert sum(span.attributes["specsplit.accepted"] for span, _ in finished) > 20
    span = by_trace[failed.trace_id]
    assert (span.is_error, span.attributes["error.type"], span.attributes["specsplit.outcome"]) == (
        True,
        "unavailable",
        "unavailable",
    )

    def gained(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    all_spans = [by_trace[caller.trace_id] for caller in callers]
    for name, attribute in (
        ("specsplit_gateway_prompt_tokens_total", "gen_ai.usage.input_tokens"),
        ("specsplit_gateway_generation_tokens_total", "gen_ai.usage.output_tokens"),
    ):
        assert gained(name) == sum(span.attributes[attribute] for span in all_spans), name
    for position in range(8):
        accepted = gained("specsplit_gateway_accepted_tokens_total", drafter="ngram", position=str(position))
        assert accepted == sum(
            (*span.attributes["specsplit.accepted_by_position"], *[0] * 8)[position] for span in all_spans
        )


async def test_no_text_is_in_the_trace_file(traced: Stack) -> None:
    secret = "Xyzzy-plugh-4711"
    caller = Caller(is_sampled=True)
    async with Client(traced) as client:
        request = GenerateRequest(
            prompt=f"{secret} {secret}", max_tokens=30, temperature=0.0, ignore_eos=True
        )
        result = await client.generate(request, traceparent=caller.traceparent)
    await asyncio.to_thread(
        traced.wait_spans, lambda spans: caller.trace_id in request_spans(spans), "the request's span"
    )
    written = (traced.folder / "traces.jsonl").read_text()
    for text in (secret, result.text):
        assert len(text) > 10
        assert text not in written
        assert json.dumps(text)[1:-1] not in written


async def test_usage_says_why_nothing_was_drafted(traced: Stack) -> None:
    """Over both APIs and in the request's span."""
    cases = [
        ({"prompt": REPETITIVE, "max_tokens": 8, "speculation": {"k": 0}}, "off"),
        ({"prompt": REPETITIVE, "max_tokens": 1}, "no_room"),
        ({"prompt": "qwertyuiop", "max_tokens": 6, "temperature": 2, "seed": 1}, "no_match"),
        ({"prompt": REPETITIVE, "max_tokens": 60}, None),
    ]
    async with httpx.AsyncClient(base_url=traced.http) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def reason(body: dict[str, Any]) -> str | None:
            caller = Caller(is_sampled=False)
            body = {"model": model, "temperature": 0, "ignore_eos": True, **body}
            reply = await http.post("/v1/completions", json=body, headers={"traceparent": caller.traceparent})
            said: str | None = reply.json()["usage"]["speculation"]["no_draft_reason"]
            spans = await asyncio.to_thread(
                traced.wait_spans, lambda spans: caller.trace_id in request_spans(spans), "the span"
            )
            span = request_spans(spans)[caller.trace_id]
            assert span.attributes.get("specsplit.no_draft_reason") == said
            assert span.attributes["specsplit.k"] == body.get("speculation", {"k": 4})["k"]
            return said

        for body, why in cases:
            assert await reason(body) == why, body
        with traced.frozen("drafter"):
            assert await reason(cases[-1][0]) == "drafter_away"
            async with Client(traced) as client:
                request = GenerateRequest(prompt=REPETITIVE, max_tokens=20, temperature=0.0, ignore_eos=True)
                usage = (await client.generate(request)).usage
                assert usage is not None
                assert (usage.drafted, usage.no_draft_reason) == (0, NoDraftReason.DRAFTER_AWAY)


async def test_restarts_are_a_metric(traced: Stack) -> None:
    before = traced.child("drafter")["restarts"]
    assert traced.metrics("drafter")("specsplit_drafter_restarts_total") == before
    pid = traced.kill("drafter")
    await asyncio.to_thread(traced.wait_replaced, pid)
    assert traced.metrics("drafter")("specsplit_drafter_restarts_total") == before + 1
