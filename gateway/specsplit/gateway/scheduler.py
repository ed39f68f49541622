"""Which requests to open and what each step computes. Pure functions of their arguments: no I/O, no clock.

Order is (priority, arrival, id) throughout and never depends on a container's iteration order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specsplit.core.types import VerifierDescription
from specsplit.gateway.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One row of the next step: compute `num_tokens` committed tokens and at most `max_draft` drafts."""

    sequence: Sequence
    generation: int
    num_tokens: int
    max_draft: int


def in_order(sequences: Iterable[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda sequence: sequence.request.order)


def num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _max_rows(verifier: VerifierDescription) -> int:
    """Rows of one step: each computes a token at least."""
    return min(verifier.max_step_rows, verifier.max_step_tokens)


def choose_to_open(
    sequences: Iterable[Sequence], verifier: VerifierDescription, *, free_blocks: int
) -> list[Sequence]:
    """The waiting requests to open now, in order.

    A request is opened when its committed tokens and the next one fit into the free blocks that requests
    before it will not need: those still prefilling need the rest of their prompt, each decoding one a block
    to grow into. Blocks of opened requests that come after it count as free, for the verifier takes them back
    in this same order. Requests after one that does not fit wait behind it, so nothing overtakes forever.
    """
    ordered = in_order(sequences)
    opened = [s for s in ordered if s.phase in (Phase.OPENING, Phase.RUNNING)]
    room = _max_rows(verifier) - len(opened)
    chosen: list[Sequence] = []
    for candidate in ordered:
        if candidate.phase is not Phase.WAITING:
            continue
        if room <= len(chosen):
            break
        available = free_blocks
        for other in opened:
            held = num_blocks(other.num_computed, verifier.block_size)
            if other.request.order < candidate.request.order:
                available -= num_blocks(len(other.token_ids) + 1, verifier.block_size) - held + 1
            else:
                available += held
        for other in chosen:
            available -= num_blocks(len(other.token_ids) + 1, verifier.block_size)
        need = num_blocks(len(candidate.token_ids) + 1, verifier.block_size)
        if need > available:
            break
        chosen.append(candidate)
    return chosen


def schedule(
    sequences: Iterable[Sequence], verifier: VerifierDescription, *, max_prefill_tokens: int
) -> list[PlannedRow]:
    """The rows of the next step, in order.

    Every decoding request gets a row of one token. What waits to be prefilled gets up to
    `max_prefill_tokens` in chunks in order, but not more than half of the rest of the budget before drafts
    have had theirs: neither starves the other. Drafts are granted in order.
    """
    running = in_order(s for s in sequences if s.phase is Phase.RUNNING)[: _max_rows(verifier)]
    decoding = [s for s in running if s.num_uncomputed == 1]
    prefilling = [s for s in running if s.num_uncomputed > 1]
    budget = verifier.max_step_tokens - len(decoding)
    num_waiting = min(sum(s.num_uncomputed for s in prefilling), max_prefill_tokens)
    reserved = min(num_waiting, -(-budget // 2))
    rows: list[PlannedRow] = []
    for sequence in decoding:
        max_draft = min(_max_draft(sequence, verifier), budget - reserved)
        budget -= max_draft
        rows.append(PlannedRow(sequence, sequence.generation, num_tokens=1, max_draft=max_draft))
    budget = min(budget, max_prefill_tokens)
    for sequence in prefilling:
        chunk = min(sequence.num_uncomputed, budget)
        if chunk > 0:
            budget -= chunk
            rows.append(PlannedRow(sequence, sequence.generation, num_tokens=chunk, max_draft=0))
    return rows


def _max_draft(sequence: Sequence, verifier: VerifierDescription) -> int:
    """k, but no draft that could not be committed: the sampled token after the last draft must still fit."""
    room_in_context = verifier.max_sequence_tokens - len(sequence.token_ids) - 1
    room_in_output = sequence.request.sampling.max_tokens - sequence.num_output - 1
    return max(0, min(sequence.request.k, room_in_context, room_in_output))
