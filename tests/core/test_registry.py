"""The registry's scripts on real servers: what each fault is answered, and that it changes nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_server import RedisServer, programs

from specsplit.core.registry.overview import read_replicas
from specsplit.core.registry.scripts import (
    LOOKUP,
    SNAPSHOT_SWAP,
    Answer,
    ReplicaKeys,
    ReplicaState,
    members_key,
    namespace_prefix,
    parse_lookup,
)
from specsplit.core.registry.writer import RegistryWriter

NAMESPACE = b"\x00{ns}\xff\n\r"
SERVING = ReplicaState.SERVING


def chain(num: int, *, start: int = 0) -> list[bytes]:
    return [(start + n).to_bytes(16, "big") for n in range(num)]


@pytest.fixture(scope="module", params=["valkey", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    found = programs()
    if request.param not in found:
        pytest.skip("redis-server is not installed")
    server = RedisServer(found[request.param])
    yield server
    server.close()


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        yield client


def writer(
    client: redis.Redis, name: str = "a:1", incarnation: bytes = b"1" * 16, ttl_seconds: float = 60
) -> RegistryWriter:
    return RegistryWriter(
        client,
        namespace=NAMESPACE,
        name=name,
        address=name,
        incarnation=incarnation,
        ttl_seconds=ttl_seconds,
    )


def joined(client: redis.Redis, name: str = "a:1", incarnation: bytes = b"1" * 16) -> RegistryWriter:
    """Registered, with ten blocks, at seq 1."""
    w = writer(client, name, incarnation)
    assert w.register(expected=w.holder(), state=SERVING)
    assert w.apply(1, added=chain(10), removed=[]) is Answer.OK
    return w


def leading(client: redis.Redis, hashes: list[bytes]) -> dict[str, int]:
    """What a lookup says, by the replicas' names."""
    names = {replica.incarnation: replica.name for replica in read_replicas(client).get(NAMESPACE, [])}
    answer: Any = client.eval(
        LOOKUP.source, 1, members_key(NAMESPACE), namespace_prefix(NAMESPACE), b"".join(hashes)
    )
    return {names[incarnation]: num_leading for incarnation, num_leading in parse_lookup(answer).items()}


@dataclass(frozen=True)
class Fault:
    """What goes wrong after a replica has published ten blocks with seq 1, and what it is answered then."""

    name: str
    disturb: Callable[[redis.Redis, ReplicaKeys], object]
    act: Callable[[RegistryWriter], Answer]
    answer: Answer
    num_leading: int | None  # of the ten afterwards; None when the replica is not listed any more


def nothing(client: redis.Redis, keys: ReplicaKeys) -> None:
    pass


def take_over(client: redis.Redis, keys: ReplicaKeys) -> None:
    joined(client, incarnation=b"2" * 16)


def lose_replica(client: redis.Redis, keys: ReplicaKeys) -> None:
    client.unlink(keys.replica)


def leave(w: RegistryWriter) -> Answer:
    return w.leave()


def apply(seq: int) -> Callable[[RegistryWriter], Answer]:
    return lambda w: w.apply(seq, added=chain(1, start=10), removed=[])


def beat(seq: int) -> Callable[[RegistryWriter], Answer]:
    return lambda w: w.heartbeat(seq, SERVING)


def snapshot(seq: int, *, num_blocks: int = 11) -> Callable[[RegistryWriter], Answer]:
    return lambda w: w.snapshot(seq, chain(11), num_blocks=num_blocks)


FAULTS = [
    Fault("none", nothing, apply(2), Answer.OK, 10),
    Fault("duplicate", nothing, apply(1), Answer.DUPLICATE, 10),
    Fault("stale", nothing, apply(0), Answer.STALE, 10),
    Fault("gap", nothing, apply(3), Answer.GAP, 10),
    Fault("another incarnation", take_over, apply(2), Answer.WRONG_INCARNATION, 10),
    Fault("another incarnation, snapshot", take_over, snapshot(2), Answer.WRONG_INCARNATION, 10),
    Fault("another incarnation, heartbeat", take_over, beat(1), Answer.WRONG_INCARNATION, 10),
    Fault("another incarnation, leave", take_over, leave, Answer.WRONG_INCARNATION, 10),
    Fault("replica key lost", lose_replica, apply(2), Answer.UNKNOWN, None),
    Fault("replica key lost, heartbeat", lose_replica, beat(1), Answer.UNKNOWN, None),
    Fault("replica key lost, snapshot", lose_replica, snapshot(2), Answer.UNKNOWN, None),
    Fault("replica key lost, leave", lose_replica, leave, Answer.UNKNOWN, None),
    Fault("set lost", lambda c, k: c.unlink(k.blocks), apply(2), Answer.GAP, 0),
    Fault("set lost, heartbeat", lambda c, k: c.unlink(k.blocks), beat(1), Answer.GAP, 0),
    Fault("set lost, snapshot", lambda c, k: c.unlink(k.blocks), snapshot(2), Answer.OK, 10),
    Fault("a member lost", lambda c, k: c.srem(k.blocks, chain(10)[9]), apply(2), Answer.GAP, 9),
    Fault("a member too many", lambda c, k: c.sadd(k.blocks, b"x" * 16), beat(1), Answer.GAP, 10),
    Fault("seq went back", lambda c, k: c.hset(k.replica, "seq", 0), apply(2), Answer.GAP, 10),
    Fault("seq went back, heartbeat", lambda c, k: c.hset(k.replica, "seq", 0), beat(1), Answer.GAP, 10),
    Fault("old snapshot arrives late", nothing, snapshot(1), Answer.STALE, 10),
    Fault("a part of a snapshot is lost", nothing, snapshot(2, num_blocks=12), Answer.GAP, 10),
    Fault("flushed", lambda c, k: c.flushall(), apply(2), Answer.UNKNOWN, None),
    Fault("scripts flushed", lambda c, k: c.script_flush(), apply(2), Answer.OK, 10),
    Fault("members lost", lambda c, k: c.unlink(k.members), beat(1), Answer.OK, 10),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_has_its_own_answer_and_changes_nothing(client: redis.Redis, fault: Fault) -> None:
    w = joined(client)
    keys = ReplicaKeys.of(NAMESPACE, "a:1", b"1" * 16)
    fault.disturb(client, keys)
    before = client.hgetall(keys.replica), client.smembers(keys.blocks)
    assert fault.act(w) is fault.answer
    if fault.answer is not Answer.OK:
        assert (client.hgetall(keys.replica), client.smembers(keys.blocks)) == before
    assert leading(client, chain(10)).get("a:1") == fault.num_leading


def test_a_server_that_comes_back_empty_or_older_is_told_apart(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()
        w = joined(client)
        server.stop()
        server.start()
        assert w.apply(2, added=chain(1, start=10), removed=[]) is Answer.UNKNOWN
        w = joined(client)
        client.save()
        server.stop()
        server.start()
        assert leading(client, chain(12)) == {"a:1": 10}
        assert w.apply(2, added=chain(2, start=10), removed=[]) is Answer.OK
        server.stop()  # comes back with what was saved
        server.start()
        assert leading(client, chain(12)) == {"a:1": 10}
        assert w.apply(3, added=chain(1, start=12), removed=[]) is Answer.GAP
        assert w.heartbeat(2, SERVING) is Answer.GAP
        assert w.snapshot(4, chain(13), num_blocks=13) is Answer.OK
        assert leading(client, chain(13)) == {"a:1": 13}


def test_a_replica_restarted_under_its_name_scores_nothing(client: redis.Redis) -> None:
    old = joined(client)
    joined(client, "b:1", b"9" * 16)
    new = writer(client, incarnation=b"2" * 16)
    assert not new.register(expected="", state=SERVING)  # the name is not free
    assert new.register(expected=new.holder(), state=SERVING)
    assert leading(client, chain(10)) == {"a:1": 0, "b:1": 10}
    assert old.apply(2, added=chain(1, start=10), removed=[]) is Answer.WRONG_INCARNATION
    assert not old.register(expected="", state=SERVING)
    assert client.exists(ReplicaKeys.of(NAMESPACE, "a:1", b"1" * 16).blocks) == 0


def test_a_block_removed_by_one_replica_still_scores_at_the_other(client: redis.Redis) -> None:
    a, b = joined(client), joined(client, "b:1", b"9" * 16)
    assert a.apply(2, added=[], removed=chain(6, start=4)) is Answer.OK
    assert leading(client, chain(10)) == {"a:1": 4, "b:1": 10}
    assert b.apply(2, added=chain(1, start=10), removed=[]) is Answer.OK
    assert leading(client, chain(11)) == {"a:1": 4, "b:1": 11}


def test_a_snapshot_of_before_a_new_registration_arrives_too_late(client: redis.Redis) -> None:
    w = joined(client)
    assert w.snapshot(7, chain(10), num_blocks=99) is Answer.GAP  # collected, but not yet swapped in
    assert w.register(expected=w.holder(), state=SERVING, seq=7)
    assert w.snapshot(8, chain(3), num_blocks=3) is Answer.OK
    keys = ReplicaKeys.of(NAMESPACE, "a:1", b"1" * 16)
    late = client.eval(
        SNAPSHOT_SWAP.source, 3, keys.replica, keys.blocks, keys.collected(7), (b"1" * 16).hex(), 7, 10
    )
    assert late == b"STALE"
    assert leading(client, chain(10)) == {"a:1": 3}


def test_many_blocks_go_in_parts_and_readers_see_all_or_nothing(client: redis.Redis) -> None:
    w = joined(client)
    blocks = chain(20_001)
    assert w.apply(2, added=blocks, removed=[]) is Answer.OK
    assert leading(client, blocks) == {"a:1": 20_001}
    assert w.apply(3, added=[], removed=blocks) is Answer.OK
    assert leading(client, blocks) == {"a:1": 0}
    assert w.snapshot(4, blocks, num_blocks=len(blocks)) is Answer.OK
    assert leading(client, blocks) == {"a:1": 20_001}
    assert w.snapshot(5, [], num_blocks=0) is Answer.OK
    assert leading(client, blocks) == {"a:1": 0}
    assert w.apply(6, added=chain(3), removed=[]) is Answer.OK
    assert w.heartbeat(6, ReplicaState.DRAINING) is Answer.OK
    (replica,) = read_replicas(client)[NAMESPACE]
    assert (replica.address, replica.state, replica.num_blocks) == ("a:1", "draining", 3)


def test_each_part_of_a_snapshot_keeps_the_replica_alive(client: redis.Redis) -> None:
    w = joined(client)
    keys = ReplicaKeys.of(NAMESPACE, "a:1", b"1" * 16)
    client.pexpire(keys.replica, 5000)
    assert w.snapshot(2, chain(11), num_blocks=12) is Answer.GAP  # the parts came, the swap did not
    assert client.pttl(keys.replica) > 5000


def test_nothing_is_left_when_all_have_left(client: redis.Redis) -> None:
    writers = [joined(client), joined(client, "b:1", b"9" * 16)]
    assert client.dbsize() == 5
    for w in writers:
        assert w.leave() is Answer.OK
    assert client.dbsize() == 0


def test_nothing_is_left_of_replicas_that_died(client: redis.Redis) -> None:
    dead, alive = writer(client, "dead:1", b"3" * 16, ttl_seconds=0.2), joined(client)
    assert dead.register(expected="", state=SERVING)
    assert dead.apply(1, added=chain(5), removed=[]) is Answer.OK
    for key in client.scan_iter():
        assert client.pttl(key) > 0, key
    deadline = time.monotonic() + 20
    while "dead:1" in leading(client, chain(5)):
        assert time.monotonic() < deadline
    assert client.smembers(members_key(NAMESPACE)) == {b"a:1", b"dead:1"}
    assert alive.heartbeat(1, SERVING) is Answer.OK
    assert client.smembers(members_key(NAMESPACE)) == {b"a:1"}
    alive.leave()
    while client.dbsize():  # a key that has expired is counted until the server finds it
        assert time.monotonic() < deadline


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_lookup_equals_counting_one_by_one(data: st.DataObject) -> None:
    with RedisServerOnce.get().client() as client:
        client.flushall()
        num_asked = data.draw(st.integers(0, 300))
        held = data.draw(st.lists(st.integers(0, 320), max_size=4))
        for index, num in enumerate(held):
            w = writer(client, f"r{index}", bytes([index]) * 16)
            assert w.register(expected="", state=SERVING)
            assert w.snapshot(1, chain(num), num_blocks=num) is Answer.OK
        expected = {f"r{index}": min(num, num_asked) for index, num in enumerate(held)}
        assert leading(client, chain(num_asked)) == expected


class RedisServerOnce:
    """One Valkey for the property test: hypothesis allows no function-scoped fixture."""

    _server: RedisServer | None = None

    @classmethod
    def get(cls) -> RedisServer:
        if cls._server is None:
            cls._server = RedisServer(programs()["valkey"])
        return cls._server

    @classmethod
    def close(cls) -> None:
        if cls._server is not None:
            cls._server.close()


@pytest.fixture(scope="module", autouse=True)
def _close_server() -> Iterator[None]:
    yield
    RedisServerOnce.close()


def test_the_scripts_are_part_of_the_package() -> None:
    source = "from specsplit.core.registry.scripts import LOOKUP; print(len(LOOKUP.source))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd="/", check=True)
    assert int(done.stdout) > 100


def test_what_no_replica_wrote_spoils_no_lookup_and_no_overview(client: redis.Redis) -> None:
    joined(client)
    prefix = namespace_prefix(NAMESPACE)
    client.sadd(members_key(NAMESPACE), "text", "odd", "bare", b"\xff\xfe", "list")
    client.hset(f"{prefix}r:odd", mapping={"incarnation": "zz", "seq": "1", "blocks": "1"})
    client.hset(f"{prefix}r:bare", mapping={"incarnation": "ab" * 16})
    client.hset(prefix.encode() + b"r:\xff\xfe", mapping={"incarnation": "cd" * 16})
    client.set(f"{prefix}r:text", "x")
    client.set(f"{prefix}b:bare:{'ab' * 16}", "x")
    client.sadd("kv:{zz}:reps", "a")
    client.set("kv:{aa}:reps", "x")
    answer: Any = client.eval(
        LOOKUP.source, 1, members_key(NAMESPACE), namespace_prefix(NAMESPACE), b"".join(chain(10))
    )
    assert parse_lookup(answer)[b"1" * 16] == 10
    assert set(parse_lookup(answer).values()) == {0, 10}
    assert [replica.name for replica in read_replicas(client)[NAMESPACE]] == ["a:1"]
