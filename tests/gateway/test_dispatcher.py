"""Requests among several verifiers: placing, failover, what is recorded; over real gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from gateway_bench import VOCAB, Bench, admitted, bench, continuation

from specsplit.core.errors import Unavailable
from specsplit.core.types import (
    Capacity,
    Delta,
    DraftBatch,
    DraftBatchDone,
    Finished,
    NoDraftReason,
    Opened,
    Preempted,
    Status,
    StepDone,
    Usage,
    VerifierEvent,
    new_incarnation,
)
from specsplit.gateway.request import AdmittedRequest


async def finish(b: Bench, request: AdmittedRequest) -> tuple[list[int], Usage]:
    ids: list[int] = []
    async for event in b.loop.generate(request):
        if isinstance(event, Delta):
            ids += event.ids
        if isinstance(event, Finished):
            return ids, event.usage
    raise AssertionError("the stream ended without Finished")


async def test_requests_spread_over_idle_replicas(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir, num_verifiers=2) as b:
        prompts = [[n, n + 1, *range(20)] for n in range(16)]
        done = await asyncio.gather(*(finish(b, admitted(prompt)) for prompt in prompts))
        assert [ids for ids, _ in done] == [continuation(prompt[-1], 20) for prompt in prompts]
        assert all(len(verifier.opens) >= 4 for verifier in b.verifiers)
        assert sum(len(verifier.opens) for verifier in b.verifiers) == 16


async def test_a_repeated_prompt_goes_where_it_went(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir, num_verifiers=2) as b:
        for n in range(6):
            for _ in range(3):
                await finish(b, admitted([n] * 64, max_tokens=2))
        for verifier in b.verifiers:
            counts = [sum(tuple(o.prompt_ids) == (n,) * 64 for o in verifier.opens) for n in range(6)]
            assert set(counts) <= {0, 3}
        predicted = sum(b.counters[f"replica_{i}_predicted_cached_tokens"] for i in range(2))
        assert predicted == 6 * 2 * 48
        assert b.counters["routed_by_memory"] == 18


async def test_requests_of_a_lost_verifier_go_on_at_the_other(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir, num_verifiers=2) as b:
        requests = [admitted([n, n + 1], max_tokens=100) for n in range(8)]
        lost = b.verifiers[0]

        def hang_up(event: VerifierEvent) -> VerifierEvent | None:
            if isinstance(event, StepDone) and event.step_id >= 3:
                raise RuntimeError("this verifier dies")
            return event

        lost.twist = hang_up
        done = await asyncio.gather(*(finish(b, request) for request in requests))
        assert [ids for ids, _ in done] == [continuation(n + 1, 100) for n in range(8)]
        moved = [record for record in b.recorder.requests if len(record.replicas) > 1]
        assert moved
        assert all(record.num_opens > 1 for record in moved)
        assert b.counters["requests"] == 0
        assert not b.loop._placed
        assert not any(replica.num_requests for replica in b.loop._replicas.values())


async def test_a_draining_verifier_gives_its_waiting_requests_to_the_other(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir, num_verifiers=2) as b:

        def refuse(event: VerifierEvent) -> VerifierEvent:
            if isinstance(event, Opened):
                return dataclasses.replace(event, status=Status.DRAINING)
            return event

        b.verifiers[0].twist = refuse
        done = await asyncio.gather(*(finish(b, admitted([n, n + 1])) for n in range(8)))
        assert [ids for ids, _ in done] == [continuation(n + 1, 20) for n in range(8)]
        assert {address for record in b.recorder.requests for address in record.replicas[-1:]} == {
            b.addresses[1]
        }


async def test_what_is_preempted_while_its_verifier_drains_goes_on_at_the_other(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir, num_verifiers=2) as b:
        first = b.verifiers[0]
        preempted = asyncio.Event()

        def preempt(event: VerifierEvent) -> VerifierEvent:
            if isinstance(event, StepDone) and event.step_id == 3:
                target = b.loop._replicas[b.addresses[0]]._target
                target.is_draining = True
                for row in event.rows:
                    target._on_event(Preempted(row.request_id, row.generation, 64))
                preempted.set()
            return event

        first.twist = preempt
        done = await asyncio.gather(*(finish(b, admitted([n, n + 1], max_tokens=60)) for n in range(6)))
        assert [ids for ids, _ in done] == [continuation(n + 1, 60) for n in range(6)]
        assert preempted.is_set()
        assert any(record.replicas == tuple(b.addresses) for record in b.recorder.requests)


async def test_a_request_that_moved_during_the_draft_is_not_stepped_where_it_was(
    tiny_model_dir: Path,
) -> None:
    async with bench(tiny_model_dir, num_verifiers=2) as b:
        lost = b.verifiers[0]
        has_moved = asyncio.Event()

        def move(batch: DraftBatch, done: DraftBatchDone) -> DraftBatchDone | None:
            replica = b.loop._replicas[b.addresses[0]]
            if not has_moved.is_set() and replica.num_requests and len(b.drafter.batches) > 4:
                has_moved.set()
                replica._target.link.drop("while a draft is awaited")
            return None if has_moved.is_set() and len(b.drafter.batches) < 8 else done

        b.drafter.twist = move
        requests = [admitted([n, n + 1], max_tokens=60) for n in range(4)]
        done = await asyncio.gather(*(finish(b, request) for request in requests))
        assert [ids for ids, _ in done] == [continuation(n + 1, 60) for n in range(4)]
        assert b.counters["invariant_violations"] == 0
        opened = {(o.request_id, o.generation) for o in lost.opens}
        stepped = {(row.request_id, row.generation) for step in lost.steps for row in step.rows}
        assert stepped <= opened


async def test_free_blocks_heard_of_do_not_cut_a_lookup_short(tiny_model_dir: Path) -> None:
    """A verifier says its capacity often; requests that wait for the registry's answer go on waiting."""
    async with bench(tiny_model_dir, num_verifiers=2) as b:

        class Registry:
            is_open = False

            async def lookup(self, namespace: bytes, hashes: list[bytes]) -> dict[bytes, int]:
                for _ in range(5):
                    for replica in b.loop._replicas.values():
                        replica._target._on_event(Capacity(2, 64))
                    await asyncio.sleep(0)
                return {b.verifiers[1].description.incarnation: len(hashes)}

            async def close(self) -> None:
                pass

        b.loop._registry = Registry()  # type: ignore[assignment]
        for n in range(8):
            await finish(b, admitted([n] * 64, max_tokens=2))
        assert (len(b.verifiers[0].opens), len(b.verifiers[1].opens)) == (0, 8)
        assert b.counters["routed_by_registry"] == 8
        b.loop._registry = None


async def test_what_is_left_at_the_end_of_the_drain_is_failed_and_recorded(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir, num_verifiers=2) as b:
        streams = [b.loop.generate(admitted([n, n + 1], max_tokens=150)) for n in range(4)]
        for stream in streams:
            await anext(stream)
        b.loop.stop()
        for stream in streams:
            with pytest.raises(Unavailable):
                [event async for event in stream]
        b.reporter.flush()
        assert [record.outcome for record in b.recorder.requests] == ["unavailable"] * 4
        assert b.counters["requests"] == 0


async def test_a_verifier_of_another_model_serves_nothing(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir, num_verifiers=2) as b:
        other = b.verifiers[1]
        other.description = dataclasses.replace(
            other.description, model="another", incarnation=new_incarnation()
        )
        num_described = other.num_described
        b.loop._replicas[b.addresses[1]]._target.link.drop("to see what comes back")
        async with asyncio.timeout(20):
            while other.num_described < num_described + 3:  # noqa: ASYNC110  (refused twice, at least)
                await asyncio.sleep(0.01)
        assert b.counters["verifier_up"] == 1
        num_opens = len(other.opens)
        await asyncio.gather(*(finish(b, admitted([n, n + 1])) for n in range(4)))
        assert len(other.opens) == num_opens


async def test_records_add_up_to_the_usage(tiny_model_dir: Path) -> None:
    async with bench(tiny_model_dir, num_verifiers=2) as b:
        requests = [admitted([n, n + 1, *range(40)], max_tokens=20 + n, k=n) for n in range(8)]
        usages = [usage for _, usage in await asyncio.gather(*(finish(b, r) for r in requests))]
        left = admitted([5, 6], max_tokens=150)
        stream = b.loop.generate(left)
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        b.reporter.flush()
        assert [r.request_id for r in b.recorder.admitted_requests] == [
            r.request_id for r in [*requests, left]
        ]
        ended = {record.request.request_id: record for record in b.recorder.requests}
        for request, usage in zip(requests, usages, strict=True):
            record = ended[request.request_id]
            rows = [row for step in b.recorder.steps for row in step.rows if row.request is request]
            sampled = [row for row in rows if row.is_sampling]
            assert record.outcome == "length"
            assert record.usage == usage
            assert usage.steps == len(sampled)
            assert usage.drafted == sum(row.drafted for row in rows)
            assert usage.accepted == sum(row.accepted for row in rows) == sum(usage.accepted_by_position)
            assert usage.completion_tokens == sum(row.committed for row in rows)
            assert usage.prompt_tokens - 1 == sum(row.num_tokens for row in rows) - len(sampled)
            assert record.opened_ns is not None
            assert record.first_token_ns is not None
            assert record.admitted_ns <= record.opened_ns <= record.first_token_ns <= record.ended_ns
        assert ended[left.request_id].outcome == "cancelled"
        for step in b.recorder.steps:
            times = [step.started_ns, step.drafted_ns, step.sent_ns, step.answered_ns, step.committed_ns]
            assert (known := [at for at in times if at is not None]) == sorted(known)


def no_answer(batch: DraftBatch, done: DraftBatchDone) -> DraftBatchDone | None:
    return None


def no_match(batch: DraftBatch, done: DraftBatchDone) -> DraftBatchDone | None:
    return dataclasses.replace(done, rows=tuple(dataclasses.replace(r, draft_ids=()) for r in done.rows))


def lie(batch: DraftBatch, done: DraftBatchDone) -> DraftBatchDone | None:
    return dataclasses.replace(
        done, rows=tuple(dataclasses.replace(r, draft_ids=(VOCAB,)) for r in done.rows)
    )


@pytest.mark.parametrize(
    ("k", "max_tokens", "twist", "reason"),
    [
        (0, 10, None, NoDraftReason.OFF),
        (4, 1, None, NoDraftReason.NO_ROOM),
        (4, 10, no_match, NoDraftReason.NO_MATCH),
        (4, 10, no_answer, NoDraftReason.DRAFTER_AWAY),
        (4, 10, lie, NoDraftReason.DRAFTER_AWAY),
        (4, 10, None, None),
    ],
)
async def test_usage_says_why_nothing_was_drafted(
    tiny_model_dir: Path,
    k: int,
    max_tokens: int,
    twist: Callable[[DraftBatch, DraftBatchDone], DraftBatchDone | None] | None,
    reason: NoDraftReason | None,
) -> None:
    async with bench(tiny_model_dir, draft_timeout_ms=50) as b:
        if twist is not None:
            b.drafter.twist = twist
        ids, usage = await finish(b, admitted([5, 6], max_tokens=max_tokens, k=k))
        assert ids == continuation(6, max_tokens)
        assert usage.no_draft_reason is reason
        assert (usage.drafted > 0) == (reason is None)
        b.reporter.flush()
        rows = [row for step in b.recorder.steps for row in step.rows]
        decoded = [row for row in rows if row.num_tokens == 1]
        assert all(row.no_draft_reason is None for row in rows if row.num_tokens > 1)
        assert all((row.no_draft_reason is None) == (row.drafted > 0) for row in decoded)
