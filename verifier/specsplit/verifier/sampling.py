"""Samples the rows of a step in one batched operation and scores them. Knows no requests and no blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specsplit.core.types import SamplingParams, TokenIds, TokenLogprobs
from specsplit.kernels.coupled import CoupledRows, coupled_verify


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A sequence that samples: it owns 1 + len(draft_ids) rows of logits."""

    params: SamplingParams
    stop_ids: frozenset[int]
    position: int  # output tokens before the first row
    draft_ids: TokenIds


@dataclass(frozen=True, slots=True)
class Sampled:
    """The accepted drafts and one token more; one margin each."""

    token_ids: list[int]
    margins: list[float]
    is_finite: bool


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Coupled verification of all `rows`; logits [sum(1 + drafts), vocab] are as before when it returns."""
    offsets = [0]
    draft_ids: list[int] = []
    for row in rows:
        draft_ids += (*row.draft_ids, 0)
        offsets.append(len(draft_ids))
    forbidden = _forbidden(rows, offsets, vocab_size=logits.shape[1]).to(logits.device)
    flat = logits.view(-1)
    kept = flat[forbidden]
    flat[forbidden] = -torch.inf
    result = coupled_verify(
        logits,
        CoupledRows(
            offsets=torch.tensor(offsets),
            draft_ids=torch.tensor(draft_ids),
            temperature=torch.tensor([row.params.temperature for row in rows], dtype=torch.float64),
            top_k=torch.tensor([row.params.top_k for row in rows]),
            top_p=torch.tensor([row.params.top_p for row in rows], dtype=torch.float64),
            min_p=torch.tensor([row.params.min_p for row in rows], dtype=torch.float64),
            seed=torch.tensor([row.params.seed for row in rows], dtype=torch.uint64),
            position=torch.tensor([row.position for row in rows]),
        ),
    )
    flat[forbidden] = kept
    tokens, margins = result.tokens.tolist(), result.margins.tolist()
    return [
        Sampled(tokens[start : start + count], margins[start : start + count], is_finite)
        for start, count, is_finite in zip(
            offsets[:-1], result.num_sampled.tolist(), result.is_finite.tolist(), strict=True
        )
    ]


def _forbidden(rows: Sequence[SampleRow], offsets: Sequence[int], *, vocab_size: int) -> Tensor:
    """Flat 64-bit indices of the stop ids at output positions below min_tokens."""
    indices: list[int] = []
    for row, start in zip(rows, offsets[:-1], strict=True):
        for index in range(min(len(row.draft_ids) + 1, row.params.min_tokens - row.position)):
            first = (start + index) * vocab_size
            indices += (first + id_ for id_ in row.stop_ids)
    return torch.tensor(indices, dtype=torch.int64)


def token_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log probabilities of `token_ids` at those rows of `logits`, with the `num_top` best of each."""
    if not rows:
        return []
    picked = logits[torch.tensor(rows, device=logits.device)]  # [wanted, vocab]
    norm = picked.logsumexp(dim=1, keepdim=True)
    own = picked.gather(1, torch.tensor(token_ids, device=logits.device)[:, None]) - norm
    top = picked.topk(min(max(num_top), logits.shape[1]), dim=1)
    top_ids, top_logprobs = top.indices.tolist(), (top.values - norm).tolist()
    return [
        TokenLogprobs(logprob, tuple(ids[:count]), tuple(values[:count]))
        for logprob, ids, values, count in zip(
            own[:, 0].tolist(), top_ids, top_logprobs, num_top, strict=True
        )
    ]


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Compiles the kernels before the first request waits for them."""
    params = SamplingParams(max_tokens=1, seed=0, top_k=1, top_p=0.5, min_p=0.5)
    sample(torch.zeros(1, vocab_size, device=device), [SampleRow(params, frozenset(), 0, ())])
