"""Turns a step's logits into what each row commits. Changes no request; knows no blocks and no transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specsplit.core.types import FinishReason, TokenIds, TokenLogprobs
from specsplit.verifier.sampling import SampleRow, sample, token_logprobs
from specsplit.verifier.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Decision:
    """Empty for a prefill chunk; None of it holds when the logits were not finite."""

    committed_ids: TokenIds = ()
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    margins: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    is_finite: bool = True


def decide(
    logits: Tensor, rows: Sequence[tuple[SequenceState, TokenIds]], *, max_sequence_tokens: int
) -> list[Decision]:
    """For each sequence that samples, with its drafts; logits [sum(1 + drafts), vocab] in the same order."""
    if not rows:
        return []
    results = sample(logits, [SampleRow(s.sampling, s.stop_ids, s.num_outputs, drafts) for s, drafts in rows])
    cuts = [
        sequence.cut(result.token_ids, max_sequence_tokens=max_sequence_tokens)
        for (sequence, _), result in zip(rows, results, strict=True)
    ]
    logprobs = _logprobs(
        logits, rows, [ids if r.is_finite else () for (ids, _), r in zip(cuts, results, strict=True)]
    )
    return [
        Decision(
            committed_ids=committed,
            num_accepted=min(len(committed), len(result.token_ids) - 1),
            finish_reason=finish_reason,
            margins=tuple(result.margins[: len(committed)]) if sequence.sampling.report_margins else (),
            logprobs=scores,
        )
        if result.is_finite
        else Decision(is_finite=False)
        for (sequence, _), result, (committed, finish_reason), scores in zip(
            rows, results, cuts, logprobs, strict=True
        )
    ]


def _logprobs(
    logits: Tensor, rows: Sequence[tuple[SequenceState, TokenIds]], committed: Sequence[TokenIds]
) -> list[tuple[TokenLogprobs, ...]]:
    """One per committed token of the sequences that ask for them, scored in one batch."""
    where: list[int] = []
    ids: list[int] = []
    num_top: list[int] = []
    counts = []
    first = 0
    for (sequence, drafts), new_ids in zip(rows, committed, strict=True):
        wanted = sequence.sampling.num_logprobs
        counts.append(0 if wanted is None else len(new_ids))
        if wanted is not None:
            where += range(first, first + len(new_ids))
            ids += new_ids
            num_top += [wanted] * len(new_ids)
        first += 1 + len(drafts)
    scores = iter(token_logprobs(logits, where, ids, num_top))
    return [tuple(next(scores) for _ in range(count)) for count in counts]
