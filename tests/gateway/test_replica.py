"""The step loop against a verifier and a drafter that misbehave, over real gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from gateway_bench import (
    VOCAB,
    admitted,
    bench,
    continuation,
)

from specsplit.core.errors import Overloaded, ProtocolError, SpecsplitError, Unavailable
from specsplit.core.types import (
    Delta,
    DraftBatch,
    DraftBatchDone,
    DraftRowDone,
    DraftStatus,
    Opened,
    Preempted,
    Status,
    StepDone,
    VerifierEvent,
)


async def test_drafts_are_used_and_text_is_the_targets(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir) as b:
        assert await b.text([5, 6], max_tokens=23) == continuation(6, 23)
        assert len(b.verifier.steps) <= 6
        assert b.counters["requests"] == 0


LIES: list[tuple[str, Callable[[DraftRowDone], DraftRowDone], str]] = [
    ("outside the vocabulary", lambda r: dataclasses.replace(r, draft_ids=(VOCAB,)), "draft_refused"),
    ("longer than granted", lambda r: dataclasses.replace(r, draft_ids=(1,) * 9), "draft_refused"),
    ("another base", lambda r: dataclasses.replace(r, base_len=r.base_len + 1), "draft_refused"),
    ("another generation", lambda r: dataclasses.replace(r, generation=9), "draft_refused"),
    ("another request", lambda r: dataclasses.replace(r, request_id=bytes(16)), "draft_refused"),
    (
        "state lost",
        lambda r: DraftRowDone(r.request_id, 1, 0, DraftStatus.NEED_CONTEXT),
        "draft_need_context",
    ),
    ("wrong drafts", lambda r: dataclasses.replace(r, draft_ids=(1, 2, 3)), "steps"),
]


@pytest.mark.parametrize(("lie", "counter"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
async def test_a_lying_drafter_changes_nothing(
    tiny_model_dir: Path, lie: Callable[[DraftRowDone], DraftRowDone], counter: str
) -> None:
    async with bench(tiny_model_dir) as b:
        b.drafter.twist = lambda _, done: dataclasses.replace(done, rows=tuple(map(lie, done.rows)))
        assert await b.text([5, 6], max_tokens=12) == continuation(6, 12)
        assert b.counters[counter] > 0


async def test_need_context_is_answered_with_the_whole_sequence(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir) as b:

        def forget_once(batch: DraftBatch, done: DraftBatchDone) -> DraftBatchDone:
            if batch.batch_id != 2:
                return done
            (row,) = done.rows
            return dataclasses.replace(
                done,
                rows=(DraftRowDone(row.request_id, 1, row.base_len, DraftStatus.NEED_CONTEXT),),
            )

        b.drafter.twist = forget_once
        assert await b.text([5, 6], max_tokens=30) == continuation(6, 30)
        sent = [(row.base_len - len(row.new_ids)) for batch in b.drafter.batches for row in batch.rows]
        assert sent[0] == 0
        assert sent[1] > 0
        assert sent[2] == 0, "the third batch holds everything again"
        assert sent[3] > 0


async def test_a_hanging_drafter_delays_one_step_only(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir, draft_timeout_ms=50) as b:
        b.drafter.twist = lambda _, done: None
        assert await b.text([5, 6], max_tokens=15) == continuation(6, 15)
        assert b.counters["draft_timeouts"] == 1
        assert b.counters["draft_skipped_steps"] > 5
        assert len(b.drafter.batches) == 1


async def test_a_lost_answer_does_not_end_drafting_for_good(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specsplit.gateway.drafting.GIVE_UP_SECONDS", 0.1)
    async with bench(tiny_model_dir, draft_timeout_ms=50) as b:
        b.drafter.twist = lambda batch, done: None if batch.batch_id == 1 else done
        async with asyncio.timeout(20):
            while len(b.drafter.batches) < 2:
                assert await b.text([5, 6], max_tokens=15) == continuation(6, 15)
                await asyncio.sleep(0.01)
        assert b.counters["draft_timeouts"] == 1


REFUSALS = [
    Status.STALE_BASE,
    Status.DIGEST_MISMATCH,
    Status.NOT_OWNER,
    Status.STALE_GENERATION,
    Status.INVALID,
    Status.UNSUPPORTED,
]


@pytest.mark.parametrize("status", REFUSALS)
async def test_a_refused_row_is_loud_and_ends_its_request(tiny_model_dir: Path, status: Status) -> None:
    async with bench(tiny_model_dir) as b:

        def refuse(event: VerifierEvent) -> VerifierEvent:
            if isinstance(event, StepDone):
                rows = tuple(dataclasses.replace(r, status=status, committed_ids=()) for r in event.rows)
                return dataclasses.replace(event, rows=rows)
            return event

        b.verifier.twist = refuse
        with pytest.raises(ProtocolError, match=status.name):
            await b.text([5, 6])
        assert b.counters["invariant_violations"] == 1
        assert b.counters["requests"] == 0
        b.verifier.twist = lambda event: event
        assert await b.text([5, 6]) == continuation(6, 20)


@pytest.mark.parametrize(
    ("status", "code"), [(Status.NUMERIC_ERROR, "numeric_error"), (Status.INTERNAL, "internal_error")]
)
async def test_a_failed_row_ends_its_request_only(tiny_model_dir: Path, status: Status, code: str) -> None:
    async with bench(tiny_model_dir) as b:

        def fail_first(event: VerifierEvent) -> VerifierEvent:
            if isinstance(event, StepDone):
                first = b.verifier.opens[0].request_id
                rows = tuple(
                    dataclasses.replace(r, status=status, committed_ids=()) if r.request_id == first else r
                    for r in event.rows
                )
                return dataclasses.replace(event, rows=rows)
            return event

        b.verifier.twist = fail_first
        results = await asyncio.gather(
            b.text([5, 6]), b.text([7, 8]), b.text([9, 10]), return_exceptions=True
        )
        failed = [r for r in results if isinstance(r, SpecsplitError)]
        assert [error.code for error in failed] == [code]
        assert sum(isinstance(r, list) and len(r) == 20 for r in results) == 2


async def test_preempted_requests_come_back_with_their_output(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir) as b:
        num_steps = 0

        def preempt(event: VerifierEvent) -> VerifierEvent:
            nonlocal num_steps
            if isinstance(event, StepDone):
                num_steps += 1
                if num_steps in (3, 5):
                    row = event.rows[0]
                    _, ids = b.verifier.sequences[row.request_id]
                    del ids[row.base_len :]  # the verdict is void
                    rows = (dataclasses.replace(row, status=Status.PREEMPTED, committed_ids=()),)
                    return dataclasses.replace(event, rows=rows)
            return event

        b.verifier.twist = preempt
        assert await b.text([5, 6], max_tokens=40) == continuation(6, 40)
        assert [o.generation for o in b.verifier.opens] == [1, 2, 3]
        assert b.verifier.opens[2].output_ids == tuple(continuation(6, len(b.verifier.opens[2].output_ids)))
        assert len(b.verifier.opens[2].output_ids) > len(b.verifier.opens[1].output_ids) > 0
        assert b.counters["preempted"] == 2


async def test_a_preempted_event_of_an_old_generation_is_ignored(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir) as b:

        def stale(event: VerifierEvent) -> VerifierEvent | None:
            if isinstance(event, StepDone) and event.step_id == 2:
                b.target._on_event(Preempted(event.rows[0].request_id, 7, 64))
            return event

        b.verifier.twist = stale
        assert await b.text([5, 6]) == continuation(6, 20)
        assert len(b.verifier.opens) == 1


BROKEN: list[tuple[str, Callable[[StepDone], StepDone | None]]] = [
    ("a row too few", lambda d: dataclasses.replace(d, rows=())),
    (
        "a row of a stranger",
        lambda d: dataclasses.replace(
            d, rows=tuple(dataclasses.replace(r, request_id=bytes(16)) for r in d.rows)
        ),
    ),
    (
        "another base",
        lambda d: dataclasses.replace(
            d, rows=tuple(dataclasses.replace(r, base_len=r.base_len + 1) for r in d.rows)
        ),
    ),
    (
        "another generation",
        lambda d: dataclasses.replace(
            d, rows=tuple(dataclasses.replace(r, generation=r.generation + 1) for r in d.rows)
        ),
    ),
    (
        "nothing sampled",
        lambda d: dataclasses.replace(
            d,
            rows=tuple(
                dataclasses.replace(r, committed_ids=(), num_accepted=0, num_computed=r.base_len)
                for r in d.rows
            ),
        ),
    ),
    (
        "more than was drafted",
        lambda d: dataclasses.replace(
            d,
            rows=tuple(
                dataclasses.replace(r, committed_ids=(1,) * 9, num_accepted=8, num_computed=r.base_len + 8)
                for r in d.rows
            ),
        ),
    ),
    ("another step", lambda d: dataclasses.replace(d, step_id=d.step_id + 5)),
    ("no answer", lambda d: None),
]


@pytest.mark.parametrize("breakage", [b[1] for b in BROKEN], ids=[b[0] for b in BROKEN])
async def test_a_verifier_that_breaks_the_contract_loses_its_stream(
    tiny_model_dir: Path, breakage: Callable[[StepDone], StepDone | None]
) -> None:
    """The requests are opened again on the next stream and end with the same text."""
    async with bench(tiny_model_dir, step_timeout_seconds=0.5) as b:

        def break_once(event: VerifierEvent) -> VerifierEvent | None:
            if isinstance(event, StepDone) and len(b.verifier.steps) == 3:
                b.verifier.steps.append(b.verifier.steps[-1])
                return breakage(event)
            return event

        b.verifier.twist = break_once
        assert await b.text([5, 6], max_tokens=40) == continuation(6, 40)
        assert [o.generation for o in b.verifier.opens] == [1, 2]
        assert b.counters["verifier_lost"] == 1


async def test_an_open_without_an_answer_costs_the_stream(tiny_model_dir: Path) -> None:
    """No step is outstanding then, so none times out."""
    async with bench(tiny_model_dir, step_timeout_seconds=0.3) as b:
        b.verifier.twist = lambda e: None if isinstance(e, Opened) and e.generation == 1 else e
        assert await b.text([5, 6]) == continuation(6, 20)
        assert [o.generation for o in b.verifier.opens] == [1, 2]
        assert (b.counters["open_timeouts"], b.counters["verifier_lost"]) == (1, 1)


async def test_a_verifier_that_takes_the_stream_and_says_nothing_is_none(tiny_model_dir: Path) -> None:
    """Connected is not enough: requests fail when no verifier works for them in time."""
    async with bench(tiny_model_dir, step_timeout_seconds=0.3, verifier_wait_seconds=0.5) as b:

        def hang(event: VerifierEvent) -> VerifierEvent | None:
            if len(b.verifier.steps) < 3:
                return event
            b.verifier.is_hung = True
            return None

        b.verifier.twist = hang
        with pytest.raises(Unavailable):
            await b.text([5, 6], max_tokens=40)
        assert not b.loop.is_ready
        assert b.counters["requests"] == 0


async def test_a_request_that_kills_verifier_after_verifier_is_given_up(tiny_model_dir: Path) -> None:
    """Its neighbours' streams go on; the poison does not come back for ever."""
    async with bench(tiny_model_dir, step_timeout_seconds=0.2) as b:

        def die_of_poison(event: VerifierEvent) -> VerifierEvent | None:
            if isinstance(event, StepDone):
                poisoned = [o.request_id for o in b.verifier.opens if o.prompt_ids[0] == 66]
                if any(row.request_id in poisoned for row in event.rows):
                    return None
            return event

        b.verifier.twist = die_of_poison
        with pytest.raises(Unavailable, match="4 times"):
            await b.text([66, 6])
        assert await b.text([5, 6]) == continuation(6, 20)
        assert b.counters["requests"] == 0


async def test_another_model_behind_the_address_is_refused(tiny_model_dir: Path) -> None:
    """A running request is not continued by a model with another vocabulary; it fails loudly in the end."""
    async with bench(tiny_model_dir, step_timeout_seconds=0.3, verifier_wait_seconds=0.5) as b:

        def replace_model(event: VerifierEvent) -> VerifierEvent | None:
            if isinstance(event, StepDone) and len(b.verifier.steps) == 3:
                b.verifier.description = dataclasses.replace(b.verifier.description, model="other")
                return None
            return event

        b.verifier.twist = replace_model
        with pytest.raises(Unavailable):
            await b.text([5, 6], max_tokens=40)
        assert not b.loop.is_ready
        assert b.counters["requests"] == 0


async def test_too_many_requests_are_refused_before_any_work(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir, max_requests=2) as b:
        held = [b.loop.generate(admitted([1, 2])) for _ in range(2)]
        for generator in held:
            await anext(generator)
        with pytest.raises(Overloaded):
            await anext(b.loop.generate(admitted([1, 2])))
        for generator in held:
            await generator.aclose()
        assert b.counters["requests"] == 0
        assert await b.text([5, 6]) == continuation(6, 20)


async def test_draining_refuses_new_requests_and_finishes_running_ones(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir) as b:
        running = b.loop.generate(admitted([5, 6], max_tokens=30))
        await anext(running)
        draining = asyncio.ensure_future(b.loop.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await anext(b.loop.generate(admitted([1, 2])))
        ids = [i async for e in running if isinstance(e, Delta) for i in e.ids]
        assert ids == continuation(6, 30)
        await asyncio.wait_for(draining, 5)


async def test_a_step_whose_second_verdict_is_impossible_counts_as_a_whole_or_not_at_all(
    tiny_model_dir: Path,
) -> None:
    """The first row finishes its request in that very step."""
    async with bench(tiny_model_dir) as b:

        def spoil(event: VerifierEvent) -> VerifierEvent:
            if isinstance(event, StepDone) and len(event.rows) == 2 and event.rows[0].finish_reason:
                b.verifier.twist = lambda event: event
                bad = dataclasses.replace(event.rows[1], num_accepted=9)
                return dataclasses.replace(event, rows=(event.rows[0], bad))
            return event

        b.verifier.twist = spoil
        texts = await asyncio.gather(
            b.text([5, 6], max_tokens=10, k=0, arrival=1), b.text([7, 8], max_tokens=30, k=0, arrival=2)
        )
        assert texts == [continuation(6, 10), continuation(8, 30)]
        assert b.counters["invariant_violations"] == 1
        b.reporter.flush()
        for record in b.recorder.requests:
            rows = [row for step in b.recorder.steps for row in step.rows if row.request is record.request]
            assert sum(row.committed for row in rows) == record.usage.completion_tokens
