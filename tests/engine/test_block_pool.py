"""The block pool: references balance, the cache stays closed under prefixes, mistakes are loud."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specsplit.engine.block_pool import BlockPool, NoFreeBlock

NUM_BLOCKS = 12


def chain(path: str) -> list[bytes]:
    """Hashes of the prefixes of `path`: one character stands for one block of tokens."""
    return [path[: end + 1].encode() for end in range(len(path))]


class Pool(RuleBasedStateMachine):
    """Sequences over a tiny alphabet grow, are cached, trimmed and released, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, is_tracked=True)
        self.followed: set[bytes] = set()  # what is cached, by the changes alone
        self.sequences: list[tuple[str, list[int], int]] = []  # path, table, leading blocks that are cached

    @rule(path=st.text("ab", min_size=1, max_size=6))
    def open(self, path: str) -> None:
        expected = [hash_ for hash_ in chain(path) if hash_ in self.pool.cached_hashes]
        table = self.pool.match_prefix(chain(path))
        assert len(table) == len(expected)
        self.sequences.append((path, table, len(table)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        _, table, _ = self.sequences[index]
        if self.pool.num_free == 0:
            with pytest.raises(NoFreeBlock):
                self.pool.allocate()
            return
        held = {block for _, other, _ in self.sequences for block in other}
        num_free = self.pool.num_free
        block = self.pool.allocate()
        assert block not in held
        assert self.pool.num_free == num_free - 1
        table.append(block)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        path, table, num_cached = self.sequences[index]
        for i in range(num_cached, min(len(path), len(table))):
            table[i] = self.pool.cache(table[i], chain(path)[i])
        self.sequences[index] = (path, table, max(num_cached, min(len(path), len(table))))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        _, table, num_cached = self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]
        self.pool.release(table[num_cached:])
        del table[num_cached:]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        _, table, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(table)

    @rule()
    def follow(self) -> None:
        for hash_, is_cached in self.pool.take_changes().items():
            (self.followed.add if is_cached else self.followed.discard)(hash_)
        assert self.followed == self.pool.cached_hashes
        assert self.pool.take_changes() == {}

    @invariant()
    def balanced(self) -> None:
        self.pool.check_invariants(table for _, table, _ in self.sequences)

    @invariant()
    def closed_under_prefixes(self) -> None:
        for hash_ in self.pool.cached_hashes:
            assert len(hash_) == 1 or hash_[:-1] in self.pool.cached_hashes

    def teardown(self) -> None:
        for _, table, _ in self.sequences:
            self.pool.release(table)
        assert self.pool.num_free == NUM_BLOCKS
        self.pool.check_invariants([])


Pool.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase


def cached_sequence(pool: BlockPool, path: str) -> list[int]:
    return [pool.cache(pool.allocate(), hash_) for hash_ in chain(path)]


def test_the_least_recently_released_leaf_goes_first() -> None:
    pool = BlockPool(5)
    old, new = cached_sequence(pool, "xy"), cached_sequence(pool, "pq")
    pool.release(old)
    pool.release(new)
    pool.release(pool.match_prefix(chain("xy")))  # used again: now the more recent one
    held = [pool.allocate() for _ in range(2)]  # the empty block, then an evicted one
    assert set(pool.cached_hashes) == {b"x", b"xy", b"p"}
    held += [pool.allocate() for _ in range(2)]
    assert set(pool.cached_hashes) == {b"x"}
    pool.check_invariants([held])


def test_a_block_computed_twice_is_kept_once() -> None:
    pool = BlockPool(4)
    first, second = [pool.allocate()], [pool.allocate()]
    first[0] = pool.cache(first[0], b"a")
    second[0] = pool.cache(second[0], b"a")
    assert first == second
    assert pool.num_free == 3
    pool.check_invariants([first, second])


def test_a_chain_that_outlives_its_twin_keeps_its_prefix() -> None:
    """The first to compute a prefix leaves; the other's longer chain must keep its first block."""
    pool = BlockPool(3)
    first = cached_sequence(pool, "a")
    second = cached_sequence(pool, "ab")
    pool.release(first)
    third = [pool.allocate()]
    with pytest.raises(NoFreeBlock):
        pool.allocate()
    assert set(pool.cached_hashes) == {b"a", b"ab"}
    pool.check_invariants([second, third])


def test_only_the_last_state_of_a_hash_is_told_and_only_to_who_asked() -> None:
    tracked, untracked = BlockPool(1, is_tracked=True), BlockPool(1)
    for pool in (tracked, untracked):
        pool.release(cached_sequence(pool, "a"))
        pool.release(cached_sequence(pool, "b"))
        held = pool.match_prefix(chain("b"))
        pool.uncache(held)
        held = [pool.cache(held[0], b"b")]
        pool.check_invariants([held])
    assert tracked.take_changes() == {b"a": False, b"b": True}
    assert untracked.take_changes() == {}


def test_mistakes_are_loud() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="not held"):
        pool.release([block])
    with pytest.raises(AssertionError, match="not held"):
        pool.cache(block, b"a")
    with pytest.raises(IndexError):
        pool.release([7])
    held = [pool.cache(pool.allocate(), b"a")]
    with pytest.raises(AssertionError, match="cached already"):
        pool.cache(held[0], b"b")
    with pytest.raises(AssertionError, match="balance"):
        pool.check_invariants([held, held])
