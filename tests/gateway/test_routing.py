"""Where requests are sent, and what a gateway remembers of where it sent them."""

from __future__ import annotations

from collections import Counter

from specsplit.gateway.routing import RECENT_SECONDS, Candidate, Choice, Load, PrefixMemory, Router

HASHES = [bytes([n]) * 16 for n in range(8)]
IDLE = Load(queued_tokens=0, active_blocks=0, num_requests=0)


def candidate(name: str, *, load: Load = IDLE, num_blocks: int = 64) -> Candidate:
    return Candidate(name, name.encode(), num_blocks, load)


def choose(
    router: Router,
    candidates: list[Candidate],
    registered: dict[bytes, int] | None,
    *,
    hashes: list[bytes] = HASHES,
    now: float = 0.0,
) -> Choice:
    return router.choose(
        candidates,
        hashes=hashes,
        num_prompt_tokens=len(hashes) * 16 + 5,
        block_size=16,
        registered=registered,
        now=now,
    )


def test_the_replica_that_has_the_prefix_is_chosen() -> None:
    replicas = [candidate(name) for name in "abc"]
    assert choose(Router(seed=1), replicas, {b"b": 8, b"c": 3}) == Choice("b", 8)


def test_a_loaded_replica_is_left_when_that_costs_more_than_the_prefix_saves() -> None:
    registered = {b"a": 8}
    for load, expected in (
        (Load(queued_tokens=7 * 16, active_blocks=0, num_requests=1), "a"),
        (Load(queued_tokens=9 * 16, active_blocks=0, num_requests=1), "b"),
        (Load(queued_tokens=0, active_blocks=7, num_requests=1), "a"),
        (Load(queued_tokens=0, active_blocks=9, num_requests=1), "b"),
    ):
        replicas = [candidate("a", load=load), candidate("b")]
        assert choose(Router(seed=1), replicas, registered).address == expected


def test_ties_are_spread_and_the_fewer_requests_win_them() -> None:
    router = Router(seed=1)
    chosen = Counter(
        choose(router, [candidate("a"), candidate("b")], {}, hashes=[], now=n).address for n in range(200)
    )
    assert min(chosen.values()) > 50
    busy = candidate("a", load=Load(queued_tokens=0, active_blocks=0, num_requests=1))
    assert choose(router, [busy, candidate("b")], {}, hashes=[]).address == "b"


def test_without_the_registry_its_own_decisions_are_remembered() -> None:
    router, replicas = Router(seed=1), [candidate(name) for name in "abc"]
    first = choose(router, replicas, None)
    assert first.cached_blocks == 0
    for now in (1.0, 1e6):
        assert choose(router, replicas, None, now=now) == Choice(first.address, 8)


def test_what_was_sent_a_moment_ago_counts_though_the_registry_does_not_know_it_yet() -> None:
    router, replicas = Router(seed=1), [candidate(name) for name in "abc"]
    first = choose(router, replicas, {})
    assert choose(router, replicas, {}, now=RECENT_SECONDS / 2) == Choice(first.address, 8)


def test_what_was_sent_long_ago_is_the_registrys_to_know() -> None:
    router, replicas = Router(seed=1), [candidate(name) for name in "abc"]
    first = choose(router, replicas, {})
    others = {c.incarnation: 1 for c in replicas if c.address != first.address}
    assert choose(router, replicas, others, now=RECENT_SECONDS + 1).address != first.address


def test_a_restarted_replica_holds_nothing() -> None:
    router = Router(seed=1)
    choose(router, [candidate("a")], None)
    restarted = Candidate("a", b"another", 64, IDLE)
    assert choose(router, [restarted], None) == Choice("a", 0)
    assert choose(router, [Candidate("a", b"third", 64, IDLE)], {b"another": 8}) == Choice("a", 0)


def test_the_memory_is_bounded_and_forgets_the_ends_of_prefixes_first() -> None:
    memory = PrefixMemory(b"i", max_blocks=6)
    memory.remember(HASHES, now=1.0)
    assert memory.match(HASHES, since=None) == 6
    other = [bytes([n + 100]) * 16 for n in range(4)]
    memory.remember(other, now=2.0)
    assert memory.match(other, since=None) == 4
    assert memory.match(HASHES, since=None) == 2
    assert memory.match(HASHES, since=1.5) == 0
