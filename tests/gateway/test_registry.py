"""The gateway's reader against servers that answer, that are slow, silent, dead, or talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from redis_server import RedisServer, free_port, programs, slow_proxy

from specsplit.core.registry.scripts import ReplicaState
from specsplit.core.registry.writer import RegistryWriter
from specsplit.gateway.registry import MAX_FAILURES, MIN_OPEN_SECONDS, RegistryReader

NAMESPACE = b"12345678"
HASHES = [n.to_bytes(16, "big") for n in range(50)]


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    found = programs()
    if request.param not in found:
        pytest.skip("redis-server is not installed")
    server = RedisServer(found[request.param])
    publish(server)
    yield server
    server.close()


def publish(server: RedisServer) -> None:
    with server.client() as client:
        for name, num_blocks in (("a", 30), ("b", 50), ("c", 0)):
            writer = RegistryWriter(
                client,
                namespace=NAMESPACE,
                name=name,
                address=f"{name}:1",
                incarnation=name.encode() * 16,
                ttl_seconds=60,
            )
            assert writer.register(expected="", state=ReplicaState.SERVING)
            writer.apply(1, added=HASHES[:num_blocks], removed=[])


FOUND = {b"a" * 16: 30, b"b" * 16: 50, b"c" * 16: 0}


@contextlib.asynccontextmanager
async def reading(
    url: str, *, timeout_seconds: float = 5.0
) -> AsyncIterator[tuple[RegistryReader, Counter[str]]]:
    counters: Counter[str] = Counter()
    reader = RegistryReader(url, timeout_seconds=timeout_seconds, counters=counters)
    try:
        yield reader, counters
    finally:
        await reader.close()


async def test_a_lookup_names_the_leading_blocks_of_each_incarnation(server: RedisServer) -> None:
    async with reading(server.url) as (reader, counters):
        assert await reader.lookup(NAMESPACE, HASHES) == FOUND
        assert await reader.lookup(NAMESPACE, HASHES[:5]) == {b"a" * 16: 5, b"b" * 16: 5, b"c" * 16: 0}
        assert await reader.lookup(b"another!", HASHES) == {}
        assert counters["registry_lookups"] == 3


async def test_many_at_once_each_get_their_own_answer(server: RedisServer) -> None:
    async with reading(server.url) as (reader, _):
        found = await asyncio.gather(*(reader.lookup(NAMESPACE, HASHES[: n % 50 + 1]) for n in range(16)))
        for n, answer in enumerate(found):
            assert answer == {b"a" * 16: min(30, n % 50 + 1), b"b" * 16: n % 50 + 1, b"c" * 16: 0}


async def test_a_slow_server_is_not_waited_for_and_its_late_answers_reach_nobody(server: RedisServer) -> None:
    async with (
        slow_proxy(server.url, delay_seconds=0.2) as url,
        reading(url, timeout_seconds=0.02) as (reader, counters),
    ):
        for _ in range(MAX_FAILURES + 5):
            assert await reader.lookup(NAMESPACE, HASHES) is None
        assert counters["registry_lookup_timeouts"] == MAX_FAILURES
        assert counters["registry_lookup_skipped"] == 5
        assert reader.is_open
    async with slow_proxy(server.url, delay_seconds=0.05) as url, reading(url) as (reader, _):
        assert await reader.lookup(NAMESPACE, HASHES) == FOUND  # connected now
        for n in range(20):  # some are cancelled in the middle, the next one must get its own answer
            cancelled = asyncio.ensure_future(reader.lookup(NAMESPACE, HASHES[:7]))
            await asyncio.sleep(0.004 * n)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            assert await reader.lookup(NAMESPACE, HASHES[:3]) == {
                b"a" * 16: 3,
                b"b" * 16: 3,
                b"c" * 16: 0,
            }


async def test_a_dead_server_costs_nothing_and_is_found_again(server: RedisServer) -> None:
    async with reading(server.url) as (reader, counters):
        assert await reader.lookup(NAMESPACE, HASHES) == FOUND
        server.stop()
        for _ in range(MAX_FAILURES):
            assert await reader.lookup(NAMESPACE, HASHES) is None
        assert reader.is_open
        server.start()
        publish(server)
        async with asyncio.timeout(20):
            while (found := await reader.lookup(NAMESPACE, HASHES)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert found == FOUND
        assert not reader.is_open
        assert counters["registry_lookup_errors"] >= MAX_FAILURES


@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n",
        b"$5\r\nhello\r\n",
        b"*1\r\n+x\r\n",
        b"HTTP/1.1 400 Bad\r\n\r\n",
        b"\x00" * 64,
        b":7\r\n",
        b"",
    ],
)
async def test_nonsense_is_no_answer(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                if not answer:
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()

    fake = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{fake.sockets[0].getsockname()[1]}"
    async with reading(url, timeout_seconds=0.5) as (reader, counters):
        for _ in range(MAX_FAILURES + 1):
            assert await reader.lookup(NAMESPACE, HASHES) is None
        failed = counters["registry_lookup_errors"] + counters["registry_lookup_timeouts"]
        assert (failed, counters["registry_lookup_skipped"]) == (MAX_FAILURES, 1)
    fake.close()


async def test_nobody_listening_and_nobody_answering() -> None:
    async with reading(f"redis://127.0.0.1:{free_port()}", timeout_seconds=0.5) as (reader, counters):
        assert await reader.lookup(NAMESPACE, HASHES) is None
        assert counters["registry_lookup_errors"] == 1
    silent = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with reading(url, timeout_seconds=0.02) as (reader, counters):
        assert await reader.lookup(NAMESPACE, HASHES) is None
        assert counters["registry_lookup_timeouts"] == 1
    silent.close()


async def test_a_burst_of_failures_is_one_reason_to_wait_a_second(server: RedisServer) -> None:
    async with (
        slow_proxy(server.url, delay_seconds=0.2) as url,
        reading(url, timeout_seconds=0.02) as (reader, counters),
    ):
        found = await asyncio.gather(*(reader.lookup(NAMESPACE, HASHES) for _ in range(16)))
        assert found == [None] * 16
        assert reader._breaker._open_seconds == MIN_OPEN_SECONDS
        assert counters["registry_lookup_timeouts"] == 16


async def test_an_answer_that_came_while_the_loop_was_held_up_counts(server: RedisServer) -> None:
    async with reading(server.url, timeout_seconds=0.1) as (reader, counters):
        assert await reader.lookup(NAMESPACE, HASHES) == FOUND
        asking = asyncio.ensure_future(reader.lookup(NAMESPACE, HASHES))
        await asyncio.sleep(0)  # it starts
        await asyncio.sleep(0)  # the question is sent
        time.sleep(0.3)  # noqa: ASYNC251  (as a step with many rows does)
        assert await asking == FOUND
        assert counters["registry_lookup_timeouts"] == 0


@pytest.mark.parametrize("num", [64, 1000])
async def test_more_lookups_than_are_taken_at_once_do_not_close_the_registry_off(
    server: RedisServer, num: int
) -> None:
    async with reading(server.url, timeout_seconds=2) as (reader, counters):
        found = await asyncio.gather(*(reader.lookup(NAMESPACE, HASHES) for _ in range(num)))
        assert found.count(FOUND) == 16
        assert counters["registry_lookup_skipped"] == num - 16
        assert not reader.is_open
        assert await reader.lookup(NAMESPACE, HASHES) == FOUND
