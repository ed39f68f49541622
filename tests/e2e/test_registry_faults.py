"""The registry dies, hangs, crawls or forgets under load: texts stay, and it is right again by itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis_server import RedisServer, programs, slow_proxy
from stack_harness import Client, Result, Stack, assert_same_output

from specsplit.core.types import GenerateRequest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def requests_of(seed: int) -> list[GenerateRequest]:
    """Every second prompt begins like the one before it, so that there is something to find."""
    rng = random.Random(seed)
    requests: list[GenerateRequest] = []
    for number in range(12):
        tail = tuple(rng.randrange(250) for _ in range(20))
        head = tuple(rng.randrange(250) for _ in range(64))
        if number % 2:
            head = tuple(requests[-1].prompt[:64])  # type: ignore[arg-type]
        requests.append(
            GenerateRequest(
                prompt=head + tail,
                max_tokens=120,
                temperature=0.7 if number % 3 else 0.0,
                seed=number,
                ignore_eos=True,
                report_margins=True,
            )
        )
    return requests


@contextmanager
def killed(stack: Stack) -> Iterator[None]:
    """The supervisor starts it again, empty."""
    pid = stack.kill("redis")
    yield
    stack.wait_replaced(pid)


@contextmanager
def frozen(stack: Stack) -> Iterator[None]:
    """Connections stay open and nothing is answered."""
    with stack.frozen("redis"):
        yield


@contextmanager
def flushed(stack: Stack) -> Iterator[None]:
    with stack.registry() as client:
        client.flushall()
    yield


@contextmanager
def one_key_lost(stack: Stack) -> Iterator[None]:
    """The blocks of one replica alone, as a server under memory pressure would drop them."""
    with stack.registry() as client:
        client.delete(next(client.scan_iter("kv:*:b:*")))
    yield


FAULTS = [killed, frozen, flushed, one_key_lost]


async def under_fault(
    stack: Stack, fault: Callable[[Stack], object], requests: list[GenerateRequest]
) -> list[Result]:
    """Half of the requests are under way when it happens, the other half comes while it lasts."""
    is_under_way = asyncio.Event()

    def note(result: Result) -> None:
        if len(result.ids) >= 5:
            is_under_way.set()

    half = len(requests) // 2
    async with Client(stack) as client:
        early = asyncio.gather(*(client.generate(request, on_delta=note) for request in requests[:half]))
        await is_under_way.wait()
        context = fault(stack)
        await asyncio.to_thread(context.__enter__)  # type: ignore[attr-defined]
        try:
            late = await client.generate_all(requests[half:])
            return [*await early, *late]
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_fault_under_load_changes_no_text(
    two_verifiers: Stack, fault: Callable[[Stack], object]
) -> None:
    requests = requests_of(FAULTS.index(fault))
    async with Client(two_verifiers) as client:
        undisturbed = [await client.generate(request) for request in requests]
    await asyncio.to_thread(two_verifiers.wait_published)
    results = await under_fault(two_verifiers, fault, requests)
    for result, reference in zip(results, undisturbed, strict=True):
        assert_same_output(result, reference)
    await asyncio.to_thread(two_verifiers.wait_published)  # by themselves: no request comes any more
    assert sum(replica.num_blocks for replica in two_verifiers.replicas().values()) > 12 * 5
    for role, index in (("gateway", 0), ("verifier", 0), ("verifier", 1)):
        assert two_verifiers.stats(role, index)["invariant_violations"] == 0


async def test_a_registry_that_takes_200_ms_is_not_waited_for(tiny_model_dir: Path, tmp_path: Path) -> None:
    server = RedisServer(programs()["valkey"])
    requests = requests_of(9)
    try:
        async with slow_proxy(server.url, delay_seconds=0.2) as url:
            flags = ("--model", str(tiny_model_dir), "--num-blocks", "256", "--verifiers", "2")
            stack = await asyncio.to_thread(Stack, tmp_path, *flags, "--redis-url", url)
            try:
                async with Client(stack) as client:
                    first = await client.generate_all(requests)
                    second = [await client.generate(request) for request in requests]
                    for result, again in zip(first, second, strict=True):
                        assert_same_output(again, result)
                        assert again.usage is not None
                        assert again.usage.cached_tokens > 0, "the gateway's own memory knows where"
                stats = await asyncio.to_thread(stack.stats, "gateway")
                assert stats["registry_lookup_timeouts"] > 0
                assert stats["registry_lookup_skipped"] > 0, "nobody asks again and again"
                assert stats["routed_by_memory"] > len(requests) > stats["routed_by_registry"]
                await asyncio.to_thread(stack.wait_published)
            finally:
                assert await asyncio.to_thread(stack.stop) == 0
    finally:
        server.close()


@pytest.mark.parametrize("name", ["redis", "valkey"])
async def test_nothing_is_left_in_the_registry(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    if name not in programs():
        pytest.skip("no redis-server on PATH")
    server = RedisServer(programs()[name])
    try:
        flags = ("--model", str(tiny_model_dir), "--num-blocks", "256", "--verifiers", "2")
        stack = Stack(tmp_path, *flags, "--redis-url", server.url)
        try:
            assert {child["role"] for child in stack.describe()["children"]} == {
                "drafter",
                "verifier",
                "gateway",
            }
            async with Client(stack) as client:
                await client.generate_all(requests_of(10))
            await asyncio.to_thread(stack.wait_published)
            assert sum(replica.num_blocks for replica in stack.replicas().values()) > 0
        finally:
            assert stack.stop() == 0
        with server.client() as client:
            assert client.keys("*") == []
    finally:
        server.close()
