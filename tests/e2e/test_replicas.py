"""Two verifiers behind one gateway: where requests go, and what becomes of them when one of the two dies."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys

import pytest
from stack_harness import Client, Result, Stack, assert_same_output

from specsplit.core.types import GenerateRequest, Speculation

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BLOCK_SIZE = 16


def random_prompts(num: int, *, seed: int) -> list[GenerateRequest]:
    """Prompts of several blocks that share none."""
    rng = random.Random(seed)
    return [
        GenerateRequest(
            prompt=tuple(rng.randrange(250) for _ in range(rng.randrange(40, 160))),
            max_tokens=4,
            temperature=0.0,
            ignore_eos=True,
        )
        for _ in range(num)
    ]


def cachable(result: Result) -> int:
    return (len(result.prompt_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


def cached(result: Result) -> int:
    assert result.usage is not None
    return result.usage.cached_tokens


def hits(stack: Stack, what: str) -> list[int]:
    """Of each replica, in the gateway's counters."""
    stats = stack.stats("gateway")
    return [stats[f"replica_{index}_{what}"] for index in range(2)]


def wait_all_up(stack: Stack) -> None:
    stack.wait_stats("gateway", lambda s: s["verifier_up"] == 2, "both verifiers")


async def replica_of_each(stack: Stack, client: Client, requests: list[GenerateRequest]) -> list[int]:
    """Runs each alone; returns which replica found all of its blocks."""
    replicas = []
    for request in requests:
        before = hits(stack, "cached_tokens")
        result = await client.generate(request)
        gained = [now - then for now, then in zip(hits(stack, "cached_tokens"), before, strict=True)]
        assert sorted(gained) == [0, cachable(result)]
        assert cached(result) == cachable(result) > 0
        replicas.append(gained.index(cachable(result)))
    return replicas


async def test_a_repeated_prompt_lands_where_its_blocks_are(two_verifiers: Stack) -> None:
    """By the gateway's own memory, and by the registry alone after the gateway was restarted."""
    requests = random_prompts(16, seed=101)
    async with Client(two_verifiers) as client:
        for result in await client.generate_all(requests):
            assert cached(result) == 0
        placed = await replica_of_each(two_verifiers, client, requests)
        assert set(placed) == {0, 1}, "load must spread them over both"
        await asyncio.to_thread(two_verifiers.wait_published)
    pid = two_verifiers.kill("gateway")
    await asyncio.to_thread(two_verifiers.wait_replaced, pid)
    await asyncio.to_thread(wait_all_up, two_verifiers)
    async with Client(two_verifiers) as client:
        assert await replica_of_each(two_verifiers, client, requests) == placed
    stats = two_verifiers.stats("gateway")
    assert (stats["routed_by_registry"], stats["routed_by_memory"]) == (16, 0)
    assert hits(two_verifiers, "predicted_cached_tokens") == hits(two_verifiers, "cached_tokens")


async def test_after_a_restart_nothing_scores_as_cached_there(two_verifiers: Stack) -> None:
    """Case 17: under the same name; and the other replica's blocks still score."""
    requests = random_prompts(16, seed=102)
    async with Client(two_verifiers) as client:
        await client.generate_all(requests)
        placed = await replica_of_each(two_verifiers, client, requests)
        await asyncio.to_thread(two_verifiers.wait_published)
        before = two_verifiers.replicas()
        pid = two_verifiers.kill("verifier", 0)
        await asyncio.to_thread(two_verifiers.wait_replaced, pid)
        await asyncio.to_thread(wait_all_up, two_verifiers)
        await asyncio.to_thread(two_verifiers.wait_published)
        after = two_verifiers.replicas()
        restarted, other = (two_verifiers.address("verifier", index) for index in range(2))
        assert after[restarted].incarnation != before[restarted].incarnation
        assert after[restarted].num_blocks == 0
        assert after[other] == before[other]

        predicted = hits(two_verifiers, "predicted_cached_tokens")
        for request, replica in zip(requests, placed, strict=True):
            if replica == 0:
                assert cached(await client.generate(request)) == 0
        assert hits(two_verifiers, "predicted_cached_tokens") == predicted
        still_there = [request for request, replica in zip(requests, placed, strict=True) if replica == 1]
        assert set(await replica_of_each(two_verifiers, client, still_there)) == {1}


async def test_killing_one_verifier_changes_no_text(two_verifiers: Stack) -> None:
    """Its requests go on at the other one: nobody starts a successor until all have ended."""
    rng = random.Random(103)
    requests = [
        GenerateRequest(
            prompt=tuple(rng.randrange(250) for _ in range(rng.randrange(1, 60))),
            max_tokens=180,
            temperature=0.7 if number % 2 else 0.0,
            seed=number,
            ignore_eos=True,
            report_margins=True,
            speculation=Speculation(k=4),
        )
        for number in range(16)
    ]
    supervisor = two_verifiers.process
    async with Client(two_verifiers) as client:
        undisturbed = [await client.generate(request) for request in requests]
        num_lost = two_verifiers.stats("gateway")["verifier_lost"]
        is_under_way = asyncio.Event()

        def note(result: Result) -> None:
            if len(result.ids) >= 10:
                is_under_way.set()

        running = asyncio.gather(*(client.generate(request, on_delta=note) for request in requests))
        await is_under_way.wait()
        supervisor.send_signal(signal.SIGSTOP)
        try:
            pid = two_verifiers.pid("verifier", 0)
            os.kill(pid, signal.SIGKILL)
            results = await running
            stats = two_verifiers.stats("gateway")
            assert (stats["verifier_up"], stats["replica_0_up"]) == (1, 0)
            assert stats["verifier_lost"] == num_lost + 1
        finally:
            supervisor.send_signal(signal.SIGCONT)
        for result, reference in zip(results, undisturbed, strict=True):
            assert_same_output(result, reference)
        await asyncio.to_thread(two_verifiers.wait_replaced, pid)
        await asyncio.to_thread(wait_all_up, two_verifiers)
    both = tuple(two_verifiers.address("verifier", index) for index in range(2))
    await asyncio.to_thread(
        two_verifiers.wait_spans,
        lambda spans: any(span.attributes.get("specsplit.replicas") == both for span in spans),
        "a request that began at one and ended at the other",
    )
    assert two_verifiers.stats("gateway")["invariant_violations"] == 0


def test_status_shows_both_and_what_they_hold(two_verifiers: Stack) -> None:
    two_verifiers.wait_published()
    done = subprocess.run(
        [sys.executable, "-m", "specsplit.cli", "status", "--dir", str(two_verifiers.folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "250"},
    )
    for name in ("redis-0", "drafter-0", "verifier-0", "verifier-1", "gateway-0"):
        assert name in done.stdout
    stats = two_verifiers.stats("gateway")
    for index in range(2):
        address = two_verifiers.address("verifier", index)
        rows = [re.findall(r"[\w.:]+", line) for line in done.stdout.splitlines() if address in line]
        _, routing, registered = rows
        assert routing[4:] == [
            str(stats[f"replica_{index}_{what}"])
            for what in ("prompt_tokens", "predicted_cached_tokens", "cached_tokens")
        ]
        held = two_verifiers.replicas()[address]
        assert registered[1:5] == [address, held.incarnation.hex()[:8], "serving", str(held.num_blocks)]
