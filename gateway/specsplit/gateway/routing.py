"""Which replica a request is sent to. Pure but for its memory and its seeded jitter: no I/O, no clock.

The cost of a replica, in KV blocks: what waits to be prefilled there, what of this prompt is not cached
there, and what its running requests hold (each step reads all of that). The registry says what is cached;
this gateway's own decisions are newer than the registry and remain when the registry is away.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RECENT_SECONDS = 10.0  # that long the registry may not yet know what this gateway has caused


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has to do for this gateway's requests."""

    queued_tokens: int
    active_blocks: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that takes requests."""

    address: str
    incarnation: bytes
    num_blocks: int
    load: Load


@dataclass(frozen=True, slots=True)
class Choice:
    """`cached_blocks` of the prompt are expected there."""

    address: str
    cached_blocks: int


class Router:
    """Ties are broken by seeded jitter, so that gateways that know the same do not all choose the same."""

    def __init__(self, *, seed: int) -> None:
        self._memories: dict[str, PrefixMemory] = {}  # by address
        self._jitter = random.Random(seed)

    def choose(
        self,
        candidates: Sequence[Candidate],
        *,
        hashes: Sequence[bytes],
        num_prompt_tokens: int,
        block_size: int,
        registered: Mapping[bytes, int] | None,
        now: float,
    ) -> Choice:
        """`hashes` are those of the prompt's full blocks that may be taken from a cache.

        `registered` is the registry's answer, leading blocks by incarnation; None when it gave none.
        """
        assert candidates
        costs = []
        for candidate in candidates:
            cached = self._cached_blocks(candidate, hashes, registered, now)
            uncached_tokens = num_prompt_tokens - cached * block_size
            load = candidate.load
            cost = (load.queued_tokens + uncached_tokens) / block_size + load.active_blocks
            costs.append((cost, load.num_requests, self._jitter.random(), candidate, cached))
        *_, chosen, cached = min(costs, key=lambda entry: entry[:3])
        self._memories[chosen.address].remember(hashes, now)
        return Choice(chosen.address, cached)

    def _cached_blocks(
        self,
        candidate: Candidate,
        hashes: Sequence[bytes],
        registered: Mapping[bytes, int] | None,
        now: float,
    ) -> int:
        memory = self._memories.get(candidate.address)
        if memory is None or memory.incarnation != candidate.incarnation:
            memory = PrefixMemory(candidate.incarnation, max_blocks=candidate.num_blocks)
            self._memories[candidate.address] = memory
        if registered is None:
            return memory.match(hashes, since=None)
        return max(registered.get(candidate.incarnation, 0), memory.match(hashes, since=now - RECENT_SECONDS))


class PrefixMemory:
    """The newest `max_blocks` blocks that requests sent to one incarnation of a replica have caused there."""

    def __init__(self, incarnation: bytes, *, max_blocks: int) -> None:
        self.incarnation = incarnation
        self._max_blocks = max_blocks
        self._used_at: OrderedDict[bytes, float] = OrderedDict()  # least recently used first

    def remember(self, hashes: Sequence[bytes], now: float) -> None:
        """A prefix is used after what continues it, so that it is forgotten after it."""
        for hash_ in reversed(hashes):
            self._used_at[hash_] = now
            self._used_at.move_to_end(hash_)
        while len(self._used_at) > self._max_blocks:
            self._used_at.popitem(last=False)

    def match(self, hashes: Sequence[bytes], *, since: float | None) -> int:
        """Length of the leading run of `hashes` that was used, no earlier than `since`."""
        for index, hash_ in enumerate(hashes):
            used_at = self._used_at.get(hash_)
            if used_at is None or (since is not None and used_at < since):
                return index
        return len(hashes)
