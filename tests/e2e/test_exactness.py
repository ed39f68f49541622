"""The promise: whatever happens around a request, its text is the one it has alone without speculation."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest
from stack_harness import Client, Result, Stack, assert_same_output

from specsplit.core.types import ChatMessage, GenerateRequest, Speculation

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(900)]

PASSAGES = [
    "The lighthouse keeper counted nine ships, wrote their names in the blue ledger, and lit the lamp.",
    "def area(width, height):\n    if min(width, height) < 0:\n        raise ValueError\n    return width",
    "Mix two cups of flour with one cup of milk, add three eggs, a pinch of salt, and rest for an hour.",
    "On Monday the council met in the old hall; on Tuesday it voted; on Friday the bridge was closed.",
    "alpha 17, bravo 23, charlie 5, delta 88, echo 42, foxtrot 61, golf 9, hotel 70, india 34",
]
QUESTIONS = [
    "Why is the sky blue?",
    "Write a short story about a fox.",
    "Name three rivers in Europe and say one thing about each.",
    "How do I boil an egg?",
    "Explain what a prime number is to a child.",
]
LENGTHS = [5, 8, 13, 21, 34, 55, 90, 200]


def copying(index: int) -> str:
    """Text in which the model goes on copying, so that drafts are accepted to the full."""
    passage = PASSAGES[index % len(PASSAGES)]
    return f"{passage}\n\n{passage}\n\n{passage}\n\n{passage[: len(passage) // 3]}"


def mixed_requests(num: int) -> list[GenerateRequest]:
    requests = []
    for i in range(num):
        is_copying, is_sampled = i % 2 == 0, (i // 2) % 2 == 1
        requests.append(
            GenerateRequest(
                prompt=copying(i // 2)
                if is_copying
                else (ChatMessage("user", QUESTIONS[(i // 2) % len(QUESTIONS)]),),
                max_tokens=LENGTHS[(i * 5 + i // 8) % len(LENGTHS)],
                temperature=0.8 if is_sampled else 0.0,
                top_p=0.95 if is_sampled and i % 3 == 0 else None,
                top_k=40 if is_sampled and i % 3 == 1 else None,
                min_p=0.02 if is_sampled and i % 3 == 2 else None,
                seed=1000 + i,
                report_margins=True,
            )
        )
    return requests


def without_speculation(request: GenerateRequest) -> GenerateRequest:
    return dataclasses.replace(request, speculation=Speculation(k=0))


_alone: dict[GenerateRequest, Result] = {}  # several tests compare with the same runs


async def alone(client: Client, requests: list[GenerateRequest]) -> list[Result]:
    """Each request by itself, with k = 0: one in flight at a time."""
    for request in requests:
        if request not in _alone:
            _alone[request] = await client.generate(without_speculation(request))
    return [_alone[request] for request in requests]


async def test_32_mixed_requests_equal_their_runs_alone(real_stack: Stack) -> None:
    """Staggered arrival, every third cancelled somewhere, rows shuffled by the gateway's test mode."""
    requests = mixed_requests(32)
    rng = random.Random(7)
    cancelled = {i: rng.randrange(0, requests[i].max_tokens or 1) for i in range(0, 32, 3)}
    async with Client(real_stack) as client:

        async def one(i: int) -> Result:
            await asyncio.sleep(i * 0.15)  # arrival, not synchronisation
            return await client.generate(requests[i], cancel_after=cancelled.get(i))

        together = await asyncio.gather(*(one(i) for i in range(32)))
        kept = [i for i in range(32) if i not in cancelled]
        references = await alone(client, [requests[i] for i in kept])
    num_flips = sum(
        assert_same_output(together[i], reference) for i, reference in zip(kept, references, strict=True)
    )
    assert num_flips <= 2
    usages = [together[i].usage for i in kept]
    drafted = sum(usage.drafted for usage in usages if usage)
    accepted = sum(usage.accepted for usage in usages if usage)
    full_runs = sum(usage.accepted_by_position[3] for usage in usages if len(usage.accepted_by_position) > 3)
    assert drafted > 200
    assert accepted > drafted // 4
    assert full_runs > 10, "copying prompts must give fully accepted runs"
    assert real_stack.stats("gateway")["invariant_violations"] == 0


async def test_killing_the_drafter_changes_no_text(real_stack: Stack) -> None:
    """Sixteen requests in flight; the drafter dies, comes back, and is used again."""
    requests = [r for r in mixed_requests(32) if (r.max_tokens or 0) >= 21][:16]
    async with Client(real_stack) as client:
        references = await alone(client, requests)
        before = real_stack.stats("drafter")["drafted"]
        assert before >= 0
        has_drafted = asyncio.Event()

        def note(result: Result) -> None:
            if len(result.ids) >= 4:
                has_drafted.set()

        running = asyncio.gather(*(client.generate(request, on_delta=note) for request in requests))
        await has_drafted.wait()
        pid = real_stack.kill("drafter")
        results = await running
        for result, reference in zip(results, references, strict=True):
            assert_same_output(result, reference)
        await asyncio.to_thread(real_stack.wait_replaced, pid)
        await asyncio.to_thread(
            real_stack.wait_stats, "gateway", lambda s: s["drafter_up"] == 1, "the drafter's return"
        )
        again = await client.generate(requests[0])
        assert_same_output(again, references[0])
        assert again.usage is not None
        assert again.usage.drafted > 0, "the new drafter is used"


async def test_killing_the_verifier_changes_no_text(real_stack: Stack) -> None:
    """Requests re-open on its successor from their committed tokens; the clients' streams go on."""
    requests = [r for r in mixed_requests(32) if (r.max_tokens or 0) >= 34][:8]
    async with Client(real_stack) as client:
        references = await alone(client, requests)
        is_under_way = asyncio.Event()

        def note(result: Result) -> None:
            if len(result.ids) >= 10:
                is_under_way.set()

        running = asyncio.gather(*(client.generate(request, on_delta=note) for request in requests))
        await is_under_way.wait()
        pid = real_stack.kill("verifier")
        results = await running
        await asyncio.to_thread(real_stack.wait_replaced, pid)
    for result, reference in zip(results, references, strict=True):
        assert_same_output(result, reference)
    assert real_stack.child("verifier")["restarts"] >= 1


async def test_an_identical_second_request_is_cached(real_stack: Stack) -> None:
    """All full blocks that end before the prompt's last token."""
    async with Client(real_stack) as client:
        for num_prompt in (16, 17, 33, 48, 100):
            ids = tuple(random.Random(num_prompt).randrange(1000, 40000) for _ in range(num_prompt))
            request = GenerateRequest(prompt=ids, max_tokens=4, temperature=0.0, report_margins=True)
            first, second = [await client.generate(request) for _ in range(2)]
            assert first.usage is not None
            assert second.usage is not None
            assert first.usage.cached_tokens == 0
            assert second.usage.cached_tokens == (num_prompt - 1) // 16 * 16
            assert_same_output(second, first)


async def test_one_system_prompt_with_sixteen_endings(real_stack: Stack) -> None:
    """Case 12: at once and again; each equals its run alone, the second round is cached."""
    system = "You are a careful assistant for the harbour office. " + " ".join(PASSAGES)
    requests = [
        GenerateRequest(
            prompt=(ChatMessage("system", system), ChatMessage("user", f"Question {i}: what is {i} + {i}?")),
            max_tokens=12,
            temperature=0.0,
            report_margins=True,
        )
        for i in range(16)
    ]
    async with Client(real_stack) as client:
        first = await client.generate_all(requests)
        second = await client.generate_all(requests)
        references = await alone(client, requests)
    for one, two, reference in zip(first, second, references, strict=True):
        assert_same_output(one, reference)
        assert_same_output(two, reference)
        assert two.usage is not None
        assert two.usage.cached_tokens == (two.usage.prompt_tokens - 1) // 16 * 16


async def test_a_long_prompt_does_not_leak_into_the_next(real_stack: Stack) -> None:
    """Case 13: acceptance and text of a short request are the same before and after a long one."""
    short = GenerateRequest(prompt=copying(4), max_tokens=40, temperature=0.0, report_margins=True)
    long = GenerateRequest(prompt=" ".join(PASSAGES * 6), max_tokens=8, temperature=0.0)
    async with Client(real_stack) as client:
        before = await client.generate(short)
        await client.generate(long)
        after = await client.generate(short)
    assert not assert_same_output(after, before)
    assert after.usage is not None
    assert before.usage is not None
    assert after.usage.accepted_by_position == before.usage.accepted_by_position


async def test_seeds_of_neighbours_do_not_disturb(real_stack: Stack) -> None:
    """Case 7: concurrent copies of one prompt, temperature 0.1, seeds none / 1 / none / 2 …"""

    def request(seed: int | None) -> GenerateRequest:
        return GenerateRequest(
            prompt="Once upon a time", max_tokens=24, temperature=0.1, seed=seed, report_margins=True
        )

    seeds = [None, 1, None, 2, None, 1, None, 2]
    async with Client(real_stack) as client:
        results = await client.generate_all([request(seed) for seed in seeds])
        references = dict(zip((1, 2), await alone(client, [request(1), request(2)]), strict=True))
    for seed, result in zip(seeds, results, strict=True):
        assert len(result.ids) == 24 or result.finish_reason == "stop"
        if seed is not None:
            assert_same_output(result, references[seed])


async def test_temperatures_in_one_batch(real_stack: Stack) -> None:
    """Case 8: 0, 1e-6, 1 and 2, top_p 1e-6, top_k 1; greedy for the first two and the last two."""
    prompt = copying(1)
    base = {"prompt": prompt, "max_tokens": 16, "seed": 5, "report_margins": True}
    variants = [
        GenerateRequest(**base, temperature=0.0),
        GenerateRequest(**base, temperature=1e-6),
        GenerateRequest(**base, temperature=1.0),
        GenerateRequest(**base, temperature=2.0),
        GenerateRequest(**base, temperature=1.0, top_p=1e-6),
        GenerateRequest(**base, temperature=1.0, top_k=1),
    ]
    async with Client(real_stack) as client:
        results = await client.generate_all(variants)
        reference = (await alone(client, variants[:1]))[0]
    for i in (0, 1, 4, 5):
        assert results[i].ids == reference.ids, i
    assert all(result.text for result in results)
