"""Owns which KV blocks are free, held or cached. Knows no tensors, no tokens and no requests.

A block is *held* while somebody references it and *cached* while it is found under a hash: both, either or
neither. Cached blocks that nobody holds count as free: when no empty one is left, the least recently released
is evicted.

The cache is closed under prefixes: while a block is cached, so are all before it in its chain, but for what
`uncache` took out. Two rules give that. Whoever holds a cached block holds all cached blocks before it,
because `match_prefix` takes them from the first on and `cache` gives back the block that stands for the hash,
whoever computed it. And `release` frees the last of a chain first, so that no block is ever less recently
released than one that follows it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, KeysView, Sequence


class NoFreeBlock(Exception):
    """Every block is held; the caller has to release some first."""


class BlockPool:
    def __init__(self, num_blocks: int, *, is_tracked: bool = False) -> None:
        """`is_tracked`: what becomes cached and what no longer is, is kept for `take_changes`."""
        self.num_blocks = num_blocks
        self._is_tracked = is_tracked
        self._changes: dict[bytes, bool] = {}
        self._num_references = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # neither held nor cached; taken from the end
        self._evictable: OrderedDict[int, None] = (
            OrderedDict()
        )  # cached, not held; least recently released first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self._empty) + len(self._evictable)

    @property
    def cached_hashes(self) -> KeysView[bytes]:
        return self._block_of.keys()

    def allocate(self) -> int:
        """A block that is not cached, held once; raises NoFreeBlock."""
        if self._empty:
            block = self._empty.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            hash_ = self._hash_of.pop(block)
            del self._block_of[hash_]
            self._changed(hash_, is_cached=False)
        else:
            raise NoFreeBlock(f"all {self.num_blocks} blocks are held")
        assert self._num_references[block] == 0, f"block {block} was free and held"
        self._num_references[block] = 1
        return block

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Holds and returns the blocks of the longest leading run of `hashes` that is cached."""
        blocks = []
        for hash_ in hashes:
            block = self._block_of.get(hash_)
            if block is None:
                break
            self._hold(block)
            blocks.append(block)
        return blocks

    def cache(self, block: int, hash_: bytes) -> int:
        """Makes a held block findable and returns the block to use from now on.

        That is another one when the hash is cached already: the caller's reference moves to it.
        The caller has cached every block before this one in its chain.
        """
        assert self._num_references[block] > 0, f"block {block} is not held"
        assert block not in self._hash_of, f"block {block} is cached already"
        twin = self._block_of.get(hash_)
        if twin is not None:
            self._hold(twin)
            self.release((block,))
            return twin
        self._hash_of[block] = hash_
        self._block_of[hash_] = block
        self._changed(hash_, is_cached=True)
        return block

    def uncache(self, blocks: Iterable[int]) -> None:
        """Makes held blocks unfindable, for KV that cannot be trusted.

        Cached blocks that follow them can no longer be reached from the first on; they age and are evicted.
        """
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is not held"
            hash_ = self._hash_of.pop(block, None)
            if hash_ is not None:
                del self._block_of[hash_]
                self._changed(hash_, is_cached=False)

    def take_changes(self) -> dict[bytes, bool]:
        """Hashes that changed since the last call, and whether each is cached now.

        One block stands for one hash, so that a hash that is not cached has no other copy here.
        """
        changes, self._changes = self._changes, {}
        return changes

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference on each of `blocks`, which are in the order of their sequence."""
        for block in reversed(blocks):
            assert self._num_references[block] > 0, f"block {block} is not held"
            self._num_references[block] -= 1
            if self._num_references[block] > 0:
                continue
            if block in self._hash_of:
                self._evictable[block] = None
            else:
                self._empty.append(block)

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless `tables` are all that is held and each block is in its right place."""
        held = Counter(block for table in tables for block in table)
        assert held == Counter(dict(enumerate(self._num_references))), "references do not balance"
        assert {self._block_of[hash_]: hash_ for hash_ in self._block_of} == self._hash_of
        empty, evictable, cached = set(self._empty), set(self._evictable), set(self._hash_of)
        assert len(empty) == len(self._empty), "an empty block is listed twice"
        assert evictable == cached - held.keys()
        assert empty == set(range(self.num_blocks)) - held.keys() - cached

    def _changed(self, hash_: bytes, *, is_cached: bool) -> None:
        if self._is_tracked:
            self._changes[hash_] = is_cached

    def _hold(self, block: int) -> None:
        if self._num_references[block] == 0:
            del self._evictable[block]
        self._num_references[block] += 1
