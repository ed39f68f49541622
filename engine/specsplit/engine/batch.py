"""What one forward computes: rows of a ragged batch. Knows nothing of requests or who owns a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsplit.kernels.kv_write import BLOCK_SIZE

__all__ = ["BLOCK_SIZE", "Row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a ragged batch.

    `start` is the position of the first token and so the number of tokens whose KV is already there.
    `block_table` holds the physical KV blocks of positions 0 .. start + len(token_ids) - 1 and may be longer.
    Logits are wanted for the last `num_logits` tokens: 0 for a prefill chunk that samples nothing.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int
