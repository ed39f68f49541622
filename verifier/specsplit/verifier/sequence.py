"""What the verifier holds of one open request. Knows no model, no block pool and no transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from specsplit.core.block_hash import child_hash
from specsplit.core.digest import TokenDigest
from specsplit.core.trace_context import TraceContext, parse_sampled
from specsplit.core.types import (
    FinishReason,
    OpenRequest,
    Order,
    RequestId,
    RowDone,
    SamplingParams,
    StepRow,
    TokenIds,
)
from specsplit.engine.batch import BLOCK_SIZE

Owner: TypeAlias = int
"""Number of the stream that opened a request."""


@dataclass(frozen=True, slots=True)
class RowKey:
    """What makes two rows the same question."""

    generation: int
    base_len: int
    digest: int
    num_computed: int

    @classmethod
    def of(cls, row: StepRow) -> RowKey:
        return cls(row.generation, row.base_len, row.digest, row.num_computed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The last answer, kept to be given again."""

    key: RowKey
    done: RowDone


@dataclass(slots=True, eq=False)
class SequenceState:
    """Committed tokens and where their KV is.

    The KV of `ids[:num_computed]` lies in `block_table`, whose first `num_cached_blocks` are cached.
    """

    request_id: RequestId
    generation: int
    owner: Owner
    order: Order
    sampling: SamplingParams
    stop_ids: frozenset[int]
    num_prompt: int
    ids: list[int]
    digest: TokenDigest
    chain: list[bytes]
    """Hash that goes before the first block, then that of each full block hashed so far."""
    trace: TraceContext | None
    """Span of the request at its gateway, when it is sampled."""
    block_table: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    num_computed: int = 0
    finish_reason: FinishReason | None = None
    last: Verdict | None = None

    @classmethod
    def opened(
        cls, owner: Owner, request: OpenRequest, *, eos_token_ids: frozenset[int], root: bytes
    ) -> SequenceState:
        stop_ids = frozenset(request.sampling.stop_token_ids)
        ids = [*request.prompt_ids, *request.output_ids]
        return cls(
            request_id=request.request_id,
            generation=request.generation,
            owner=owner,
            order=request.order,
            sampling=request.sampling,
            stop_ids=stop_ids if request.sampling.ignore_eos else stop_ids | eos_token_ids,
            num_prompt=len(request.prompt_ids),
            ids=ids,
            digest=TokenDigest(ids),
            chain=[root],
            trace=parse_sampled(request.traceparent),
        )

    @property
    def base_len(self) -> int:
        return len(self.ids)

    @property
    def num_outputs(self) -> int:
        return len(self.ids) - self.num_prompt

    def block_hashes(self, num_blocks: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks, all of them full of committed tokens."""
        assert num_blocks * BLOCK_SIZE <= self.base_len, "only full blocks are hashed"
        while len(self.chain) <= num_blocks:
            start = (len(self.chain) - 1) * BLOCK_SIZE
            self.chain.append(child_hash(self.chain[-1], self.ids[start : start + BLOCK_SIZE]))
        return self.chain[1 : num_blocks + 1]

    def cut(self, run: TokenIds, *, max_sequence_tokens: int) -> tuple[TokenIds, FinishReason | None]:
        """The part of a sampled run that is committed, and whether the request ends with it.

        It ends at the first stop id, else where a limit is reached; a stop id at the limit is a STOP.
        """
        room = min(self.sampling.max_tokens - self.num_outputs, max_sequence_tokens - self.base_len)
        run = run[:room]
        for index, id_ in enumerate(run):
            if id_ in self.stop_ids:
                return run[: index + 1], FinishReason.STOP
        return run, FinishReason.LENGTH if len(run) == room else None

    def append(self, committed: TokenIds) -> None:
        self.ids.extend(committed)
        self.digest.append(committed)


def num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
