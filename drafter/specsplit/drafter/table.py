"""Which requests the drafter holds a state for, and whether a row connects to it; knows no transport.

A row that does not connect is answered with a status and its state is dropped: the whole sequence comes next.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from specsplit.core.digest import TokenDigest
from specsplit.core.trace_context import TraceContext, parse_sampled
from specsplit.core.types import DraftRow, DraftStatus, RequestId
from specsplit.drafter.proposer import Opening, Proposer, State


@dataclass(slots=True)
class Held(Generic[State]):
    """What is kept of one request of one stream."""

    generation: int
    length: int
    digest: TokenDigest
    state: State
    last_used: float
    trace: TraceContext | None
    """Span of the request at its gateway, when it is sampled."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a row gets no draft."""

    status: DraftStatus
    detail: str


class DraftTable(Generic[State]):
    """States by stream and request, least recently used first, bounded by their tokens in all.

    Two streams never share a state, so a stream that ends cannot take one from its successor.
    """

    def __init__(
        self,
        proposer: Proposer[State],
        *,
        max_context_tokens: int,
        idle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proposer = proposer
        self._max_context_tokens = max_context_tokens
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._held: OrderedDict[tuple[int, RequestId], Held[State]] = OrderedDict()
        self.num_context_tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self, stream: int, row: DraftRow) -> Held[State] | Refusal:
        """Brings the row's request up to its base_len, or says why that cannot be."""
        key = (stream, row.request_id)
        held = self._held.get(key)
        first_new = row.base_len - len(row.new_ids)
        if row.base_len < 1:
            return Refusal(DraftStatus.INVALID, "base_len: must be at least 1")
        if row.prompt_len > row.base_len:
            return Refusal(
                DraftStatus.INVALID, f"prompt_len: {row.prompt_len} is past base_len {row.base_len}"
            )
        if row.base_len > self._max_context_tokens:
            self.drop(stream, row.request_id)
            return Refusal(
                DraftStatus.INVALID,
                f"base_len: {row.base_len} is longer than this drafter's {self._max_context_tokens} tokens",
            )
        if held is not None and row.generation < held.generation:
            return Refusal(
                DraftStatus.INVALID,
                f"generation: {row.generation} is older than {held.generation}, held here",
            )
        if first_new == 0:
            return self._open(key, row)
        if held is None:
            return Refusal(DraftStatus.NEED_CONTEXT, "not held here")
        if row.generation != held.generation or first_new != held.length:
            self.drop(stream, row.request_id)
            return Refusal(
                DraftStatus.NEED_CONTEXT,
                f"generation {held.generation} with {held.length} tokens is held here, "
                f"the row continues generation {row.generation} from {first_new}",
            )
        held.digest.append(row.new_ids)
        if held.digest.value != row.digest:
            self.drop(stream, row.request_id)
            return Refusal(DraftStatus.NEED_CONTEXT, "digest: differs from that of the tokens held here")
        self._proposer.extend(held.state, row.new_ids)
        held.length = row.base_len
        held.last_used = self._clock()
        self.num_context_tokens += len(row.new_ids)
        self._held.move_to_end(key)
        self._evict()
        return held

    def holds(self, stream: int, request_id: RequestId, held: Held[State]) -> bool:
        """Whether `held` is still the request's state."""
        return self._held.get((stream, request_id)) is held

    def drop(self, stream: int, request_id: RequestId) -> None:
        """Forgets a request; one that is not held is ignored."""
        held = self._held.pop((stream, request_id), None)
        if held is not None:
            self.num_context_tokens -= held.length
            self._proposer.forget(held.state)

    def drop_stream(self, stream: int) -> None:
        for owner, request_id in list(self._held):
            if owner == stream:
                self.drop(owner, request_id)

    def drop_idle(self) -> None:
        """Forgets what was not used for `idle_seconds`."""
        oldest_kept = self._clock() - self._idle_seconds
        while self._held and next(iter(self._held.values())).last_used < oldest_kept:
            self.drop(*next(iter(self._held)))

    def _open(self, key: tuple[int, RequestId], row: DraftRow) -> Held[State] | Refusal:
        self.drop(*key)
        digest = TokenDigest(row.new_ids)
        if digest.value != row.digest:
            return Refusal(DraftStatus.INVALID, "digest: differs from that of new_ids, the whole sequence")
        state = self._proposer.open(Opening(row.new_ids, row.prompt_len, row.sampling))
        trace = parse_sampled(row.traceparent)
        held = Held(row.generation, row.base_len, digest, state, self._clock(), trace)
        self._held[key] = held
        self.num_context_tokens += row.base_len
        self._evict()
        return held

    def _evict(self) -> None:
        """The request just used is last and alone fits, so it is never evicted."""
        while self.num_context_tokens > self._max_context_tokens:
            self.drop(*next(iter(self._held)))
