"""The publisher between a real block pool and real servers that fail: in the end the registry is right."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis_server import RedisServer, programs, slow_proxy

from specsplit.core.registry.overview import RegisteredReplica, read_replicas
from specsplit.core.registry.scripts import ReplicaKeys
from specsplit.engine.block_pool import BlockPool
from specsplit.verifier.publisher import MAX_PENDING, Publisher

NAMESPACE = b"12345678"
INCARNATION = b"i" * 16
KEYS = ReplicaKeys.of(NAMESPACE, "v:1", INCARNATION)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer(programs()["valkey"])
    yield server
    server.close()


def start(url: str, *, incarnation: bytes = INCARNATION, ttl_seconds: float = 1.0) -> Publisher:
    publisher = Publisher(
        url, namespace=NAMESPACE, address="v:1", incarnation=incarnation, ttl_seconds=ttl_seconds
    )
    publisher.start()
    return publisher


def hashes(num: int, *, start: int = 0) -> dict[bytes, bool]:
    return {(start + n).to_bytes(16, "big"): True for n in range(num)}


def wait(is_so: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def published(server: RedisServer) -> set[bytes] | None:
    """What readers see; None while the server or the replica is away."""
    try:
        with server.client() as client:
            held: Any = client.hgetall(KEYS.replica)
            members: Any = client.smembers(KEYS.blocks)
            if client.smembers(KEYS.members) != {b"v:1"}:
                return None
    except redis.RedisError:
        return None
    if not held or held[b"incarnation"].decode() != INCARNATION.hex() or int(held[b"blocks"]) != len(members):
        return None
    return set(members)


def replicas(server: RedisServer) -> list[RegisteredReplica]:
    with server.client() as client:
        return read_replicas(client).get(NAMESPACE, [])


def test_what_is_cached_is_published_and_leaves_with_the_replica(server: RedisServer) -> None:
    publisher = start(server.url)
    publisher.put(hashes(10))
    publisher.put(dict.fromkeys(list(hashes(10))[6:], False))
    wait(lambda: published(server) == set(hashes(6)), "published")
    publisher.drain()
    wait(lambda: [r.state for r in replicas(server)] == ["draining"], "draining")
    assert publisher.counters()["registry_published_blocks"] == 6
    publisher.stop(timeout=10)
    with server.client() as client:
        assert client.dbsize() == 0


def flush(server: RedisServer, _: Publisher) -> None:
    with server.client() as client:
        client.flushall()


def flush_scripts(server: RedisServer, _: Publisher) -> None:
    with server.client() as client:
        client.script_flush()


def restart(server: RedisServer, _: Publisher) -> None:
    server.stop()
    server.start()


def lose_replica(server: RedisServer, _: Publisher) -> None:
    with server.client() as client:
        client.unlink(KEYS.replica)


def lose_set(server: RedisServer, _: Publisher) -> None:
    with server.client() as client:
        client.unlink(KEYS.blocks)


def lose_a_block(server: RedisServer, _: Publisher) -> None:
    with server.client() as client:
        client.spop(KEYS.blocks)


def go_back(server: RedisServer, _: Publisher) -> None:
    with server.client() as client:
        client.hincrby(KEYS.replica, "seq", -1)


def freeze_for_long(server: RedisServer, publisher: Publisher) -> None:
    """Longer than the publisher waits: it cannot know what was done."""
    num_errors = publisher.counters()["registry_errors"]
    server.freeze()
    wait(lambda: publisher.counters()["registry_errors"] > num_errors, "gives up")
    server.thaw()


def run_out_of_memory(server: RedisServer, publisher: Publisher) -> None:
    num_errors = publisher.counters()["registry_errors"]
    with server.client() as client:
        client.config_set("maxmemory", "1")
        wait(lambda: publisher.counters()["registry_errors"] > num_errors, "refused")
        client.config_set("maxmemory", "0")


QUICK = [flush, flush_scripts, restart, lose_replica, lose_set, lose_a_block, go_back]


def lose_seq(server: RedisServer, publisher: Publisher) -> None:
    with server.client() as client:
        client.hdel(KEYS.replica, "seq")


def go_ahead(server: RedisServer, publisher: Publisher) -> None:
    with server.client() as client:
        client.hset(KEYS.replica, "seq", 500)


def break_seq(server: RedisServer, publisher: Publisher) -> None:
    with server.client() as client:
        client.hset(KEYS.replica, "seq", "abc")


def change_type(key: str) -> Callable[[RedisServer, Publisher], None]:
    def change(server: RedisServer, publisher: Publisher) -> None:
        with server.client() as client:
            client.set(key, "x")

    change.__name__ = f"change_type_{key[-20:]}"
    return change


DISTURBANCES = [
    lose_seq,
    break_seq,
    go_ahead,
    *(change_type(key) for key in (KEYS.members, KEYS.replica, KEYS.blocks)),
    *QUICK,
    freeze_for_long,
    run_out_of_memory,
]


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda disturb: disturb.__name__)
@pytest.mark.parametrize("is_busy", [False, True])
def test_the_registry_refills_by_itself(
    server: RedisServer, disturb: Callable[[RedisServer, Publisher], None], is_busy: bool
) -> None:
    publisher = start(server.url)
    publisher.put(hashes(100))
    wait(lambda: published(server) == set(hashes(100)), "published")
    disturb(server, publisher)
    if is_busy:
        publisher.put(hashes(1, start=100))
    expected = set(hashes(101 if is_busy else 100))
    wait(lambda: published(server) == expected, f"right again: {publisher.counters()}")
    publisher.put(hashes(1, start=200))
    wait(lambda: published(server) == expected | set(hashes(1, start=200)), "goes on")
    publisher.stop(timeout=10)


def test_a_server_that_is_away_at_first_is_found_later() -> None:
    server = RedisServer(programs()["valkey"])
    server.stop()
    publisher = start(server.url)
    publisher.put(hashes(10))
    wait(lambda: publisher.counters()["registry_errors"] >= 2, "errors")
    assert publisher.counters()["registry_connected"] == 0
    server.start()
    wait(lambda: published(server) == set(hashes(10)), "published")
    assert publisher.counters()["registry_connected"] == 1
    publisher.stop(timeout=10)
    server.close()


def test_more_changes_than_are_kept_become_a_snapshot(server: RedisServer) -> None:
    publisher = start(server.url)
    wait(lambda: published(server) == set(), "registered")
    server.freeze()
    for n in range(0, 2 * MAX_PENDING, 1000):
        publisher.put(hashes(1000, start=n))
    server.thaw()
    wait(lambda: published(server) == set(hashes(2 * MAX_PENDING)), "all of them")
    assert publisher.counters()["registry_pending"] == 0
    publisher.stop(timeout=10)


def test_of_two_processes_with_one_address_the_newer_is_heard(server: RedisServer) -> None:
    old = start(server.url, incarnation=b"o" * 16)
    old.put(hashes(5))
    wait(lambda: [r.num_blocks for r in replicas(server)] == [5], "the old one")
    new = start(server.url)
    new.put(hashes(3))
    wait(lambda: published(server) == set(hashes(3)), "the new one")
    old.put(hashes(1, start=100))
    wait(lambda: old.counters()["registry_superseded"] == 1, "the old one knows")
    wait(lambda: published(server) == set(hashes(3)), "still the new one")
    new.stop(timeout=10)
    wait(lambda: [r.num_blocks for r in replicas(server)] == [6], "the name is free again")
    old.stop(timeout=10)
    with server.client() as client:
        assert client.dbsize() == 0


def test_a_process_that_died_is_forgotten(server: RedisServer) -> None:
    source = f"""
from specsplit.verifier.publisher import Publisher
publisher = Publisher(
    {server.url!r}, namespace={NAMESPACE!r}, address="v:1", incarnation={INCARNATION!r}, ttl_seconds=1
)
publisher.start()
publisher.put(dict.fromkeys({list(hashes(5))!r}, True))
publisher._thread.join()
"""
    process = subprocess.Popen([sys.executable, "-c", source])
    try:
        wait(lambda: published(server) == set(hashes(5)), "published")
    finally:
        process.kill()
        process.wait(20)
    with server.client() as client:
        wait(lambda: client.dbsize() == 0, "expired")


async def test_a_slow_or_silent_server_delays_nobody(server: RedisServer) -> None:
    async with slow_proxy(server.url, delay_seconds=0.2) as url:
        publisher = start(url, ttl_seconds=15)
        for n in range(300):
            publisher.put(hashes(10, start=10 * n))
            await asyncio.sleep(0)  # the proxy runs on this very loop: an answer waited for would never come
        await asyncio.to_thread(wait, lambda: published(server) == set(hashes(3000)), "all of them")
        assert publisher.counters()["registry_errors"] == 0
        await asyncio.to_thread(publisher.stop, timeout=10)
    silent = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    publisher = start(f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}")
    publisher.put(hashes(10))
    await asyncio.to_thread(wait, lambda: publisher.counters()["registry_errors"] >= 1, "gives up")
    await asyncio.to_thread(publisher.stop, timeout=10)
    silent.close()


async def test_a_snapshot_that_takes_longer_than_the_ttl_arrives(server: RedisServer) -> None:
    async with slow_proxy(server.url, delay_seconds=0.2) as url:
        publisher = start(url, ttl_seconds=1.0)
        publisher.put(hashes(50_000))  # 13 parts
        await asyncio.to_thread(wait, lambda: published(server) == set(hashes(50_000)), "all of them")
        await asyncio.to_thread(publisher.stop, timeout=10)


@pytest.mark.parametrize(
    "answer", [b"+PONG\r\n", b":7\r\n", b"*1\r\n" * 500, b"$-1\r\n", b"+GAP\r\n", b"\xff\x00\r\n"]
)
async def test_nonsense_does_not_end_the_publisher(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                writer.write(answer)
                await writer.drain()
        writer.close()

    fake = await asyncio.start_server(serve, "127.0.0.1", 0)
    publisher = start(f"redis://127.0.0.1:{fake.sockets[0].getsockname()[1]}")
    publisher.put(hashes(10))
    await asyncio.to_thread(wait, lambda: publisher.counters()["registry_errors"] >= 3, "several errors")
    assert publisher._thread.is_alive()
    await asyncio.to_thread(publisher.stop, timeout=10)
    assert not publisher._thread.is_alive()
    fake.close()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_pool_and_the_server_do_the_registry_ends_right(server: RedisServer, seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(40, is_tracked=True)
    publisher = start(server.url)
    held: list[list[int]] = []
    for turn in range(400):
        if held and (rng.random() < 0.5 or pool.num_free < 8):
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            prefix = rng.randrange(6)
            chain = [bytes([prefix]) * 4 + n.to_bytes(12, "big") for n in range(rng.randrange(1, 8))]
            table = pool.match_prefix(chain)
            for hash_ in chain[len(table) :]:
                table.append(pool.cache(pool.allocate(), hash_))
            if rng.random() < 0.05:
                pool.uncache(table[-1:])
            held.append(table)
        if changes := pool.take_changes():
            publisher.put(changes)
        if turn % 60 == 59:
            rng.choice(QUICK)(server, publisher)
        if rng.random() < 0.1:
            time.sleep(0.02)
    wait(lambda: published(server) == set(pool.cached_hashes), "the same in the end")
    publisher.stop(timeout=10)
