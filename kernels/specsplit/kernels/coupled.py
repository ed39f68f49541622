"""Samples the target's tokens and accepts the drafts that equal them; does not know requests or stop rules.

The rule (Daliri et al., arXiv 2408.07978; temperature 0 is the plain argmax, the lowest id wins exact ties):

    t_i = argmax_v [ log p'_i(v) + G(seed, position_i, v) ]          draft d_i is accepted iff d_i = t_i

p' is the softmax of logits / temperature after the filters. Its normaliser does not change the argmax, so the
score is logit / temperature + G, in float64. The filters, in order, on the distribution at that temperature:

    min_p  keeps p(v) >= min_p * max p;
    top_k  keeps every logit that is at least the k-th largest of those;
    top_p  renormalises what is left and keeps the fewest most probable tokens whose mass reaches top_p.

Tokens tied with the last one kept are kept, so that a result never depends on an order of tokens. The drafts
play no part in what is sampled: only in how far the rows of a sequence are valid.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specsplit.kernels.coupled_cpu import verify_batch
from specsplit.kernels.noise import gumbel


@dataclass(frozen=True, slots=True)
class CoupledRows:
    """What is to be verified: R sequences that own N rows of logits. Tensors may lie on the CPU."""

    offsets: Tensor  # int64 [R + 1]; sequence r owns rows offsets[r] .. offsets[r + 1] - 1: its drafts + 1
    draft_ids: (
        Tensor  # int64 [N]; the draft compared with the token of that row; a sequence's last entry is ignored
    )
    temperature: Tensor  # float64 [R], >= 0
    top_k: Tensor  # int64 [R], 0 = off
    top_p: Tensor  # float64 [R], in (0, 1], 1 = off
    min_p: Tensor  # float64 [R], in [0, 1], 0 = off
    seed: Tensor  # uint64, or int64 with the same bits, [R]
    position: Tensor  # int64 [R]; output tokens before the sequence's first row


@dataclass(frozen=True, slots=True)
class CoupledResult:
    """What was sampled, on the logits' device. Rows past a sequence's num_sampled hold token 0, margin +inf.

    A margin is the smallest change, in score units, after which the row could have given another token: the
    lead over the next best score; how far the token is from being dropped by a filter; how far a token that
    would have scored better is from being kept (in logits / temperature; for top_p also in mass). Greedy: in
    logits. It holds for changes as small as rounding: larger ones reorder tokens, and so shift the masses.
    """

    tokens: Tensor  # int64 [N]
    num_sampled: Tensor  # int64 [R]; accepted drafts + 1; if not is_finite, the rows before the broken one
    margins: Tensor  # float32 [N]
    is_finite: Tensor  # bool [R]; False if a row that was reached holds NaN or +inf, or nothing but -inf


def coupled_verify(logits: Tensor, rows: CoupledRows) -> CoupledResult:
    """Verifies a batch of sequences on the logits' device; logits float32 [N, V], -inf = never sampled."""
    _check(logits, rows)
    if logits.device.type == "cpu":
        return _coupled_verify_cpu(logits, rows)
    return coupled_verify_reference(logits, rows)


def _check(logits: Tensor, rows: CoupledRows) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[1] == 0:
        raise ValueError(
            f"logits: expected float32 [rows, vocabulary], got {logits.dtype} {list(logits.shape)}"
        )
    num_sequences = rows.temperature.numel()
    floats, ints = (torch.float64,), (torch.int64,)
    for name, dtypes, length in (
        ("offsets", ints, num_sequences + 1),
        ("draft_ids", ints, logits.shape[0]),
        ("temperature", floats, num_sequences),
        ("top_k", ints, num_sequences),
        ("top_p", floats, num_sequences),
        ("min_p", floats, num_sequences),
        ("seed", (torch.uint64, torch.int64), num_sequences),
        ("position", ints, num_sequences),
    ):
        column: Tensor = getattr(rows, name)
        if column.shape != (length,) or column.dtype not in dtypes:
            raise ValueError(
                f"{name}: expected {dtypes[0]} [{length}], got {column.dtype} {list(column.shape)}"
            )
    # Columns that are on a device already are their sender's word: reading them would stall it.
    if rows.offsets.device.type != "cpu" or num_sequences == 0:
        return
    offsets = rows.offsets.numpy()
    if offsets[0] != 0 or offsets[-1] != logits.shape[0] or np.diff(offsets).min() < 1:
        raise ValueError(f"offsets: must rise from 0 to {logits.shape[0]}, got {offsets.tolist()}")
    for name, lowest, highest in (
        ("temperature", 0.0, sys.float_info.max),
        ("top_k", 0, 2**63 - 1),
        ("top_p", sys.float_info.min, 1.0),
        ("min_p", 0.0, 1.0),
        ("position", 0, 2**31 - 1),
    ):
        values = getattr(rows, name).numpy()
        if not (lowest <= values.min() and values.max() <= highest):  # written so that NaN is refused
            raise ValueError(f"{name}: must lie in [{lowest}, {highest}], got {values.tolist()}")


def _coupled_verify_cpu(logits: Tensor, rows: CoupledRows) -> CoupledResult:
    tokens = torch.zeros(logits.shape[0], dtype=torch.int64)
    margins = torch.full((logits.shape[0],), torch.inf, dtype=torch.float32)
    num_sampled = torch.zeros(rows.temperature.numel(), dtype=torch.int64)
    is_finite = torch.zeros(rows.temperature.numel(), dtype=torch.bool)
    verify_batch(
        torch.get_num_threads(),
        rows.temperature.numel(),
        logits.detach().contiguous().numpy(),
        rows.offsets.contiguous().numpy(),
        rows.draft_ids.contiguous().numpy(),
        rows.temperature.contiguous().numpy(),
        rows.top_k.contiguous().numpy(),
        rows.top_p.contiguous().numpy(),
        rows.min_p.log().numpy(),
        rows.seed.contiguous().numpy().view(np.uint64),
        rows.position.contiguous().numpy(),
        tokens.numpy(),
        margins.numpy(),
        num_sampled.numpy(),
        is_finite.numpy(),
    )
    return CoupledResult(tokens, num_sampled, margins, is_finite)


def coupled_verify_reference(logits: Tensor, rows: CoupledRows) -> CoupledResult:
    """The same in plain torch, every row at once and sorted whole: the truth in tests, and the CUDA path."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    lengths = rows.offsets.diff()
    owner = torch.repeat_interleave(lengths, output_size=num_rows)  # [N] sequence of each row
    index = torch.arange(num_rows, device=rows.offsets.device)
    position = (rows.position[owner] + index - rows.offsets[owner]).to(device)
    is_last = (index == rows.offsets[owner + 1] - 1).to(device)

    def spread(column: Tensor) -> Tensor:  # [R] -> [N, 1] on the device
        return column[owner].to(device)[:, None]

    x = logits.double()  # [N, V]
    top = x.amax(dim=1, keepdim=True)  # [N, 1]; NaN if the row holds one
    is_row_finite = top.isfinite()
    x = torch.where(is_row_finite, x, 0.0)
    top = torch.where(is_row_finite, top, 0.0)

    temperature = spread(rows.temperature)
    is_greedy = (temperature == 0) | ~(top / temperature).isfinite()
    temperature = torch.where(is_greedy, 1.0, temperature)
    top_k = torch.where(is_greedy, 0, spread(rows.top_k))
    top_p = torch.where(is_greedy, 1.0, spread(rows.top_p))
    log_min_p = torch.where(is_greedy, -torch.inf, spread(rows.min_p.log()))

    # A filter keeps the logits at or above a value. `order`: the row largest first, -inf past what is left.
    none = torch.full_like(top, -torch.inf)
    order = x.sort(dim=1, descending=True).values
    rank = torch.arange(vocab_size, device=device)[None, :]
    min_p_floor = top + temperature * log_min_p
    order = torch.where(order >= min_p_floor, order, -torch.inf)
    beyond = torch.cat((order, none), dim=1)  # [N, V + 1], so that "the next one" exists for every rank

    is_top_k = (top_k > 0) & (top_k < vocab_size)
    kth = torch.where(is_top_k, top_k, 1)
    num_left = (order > -torch.inf).sum(dim=1, keepdim=True)
    is_cut = is_top_k & (kth < num_left)
    top_k_floor = torch.where(is_cut, beyond.gather(1, kth - 1), none)
    top_k_next = torch.where(is_cut, beyond.gather(1, kth), none)
    order = torch.where(order >= top_k_floor, order, -torch.inf)
    beyond = torch.cat((order, none), dim=1)

    is_top_p = top_p < 1
    mass = torch.exp((order - top) / temperature)
    passed = mass.cumsum(dim=1)
    total = passed[:, -1:]
    num_left = (order > -torch.inf).sum(dim=1, keepdim=True)
    reached = torch.minimum((passed < top_p * total).sum(dim=1, keepdim=True), num_left - 1)
    top_p_floor = torch.where(is_top_p, beyond.gather(1, reached), none)
    top_p_next = torch.where(is_top_p, beyond.gather(1, reached + 1), none)
    floor = torch.maximum(torch.maximum(min_p_floor, top_k_floor), top_p_floor)

    noise = gumbel(rows.seed.view(torch.int64)[owner].to(device), position, vocab_size)
    scores = x / temperature + torch.where(is_greedy, 0.0, noise)
    is_kept = (x >= floor) & (x > -torch.inf)
    kept_scores = torch.where(is_kept, scores, -torch.inf)
    best = kept_scores.amax(dim=1, keepdim=True)
    token = torch.where(kept_scores == best, rank, vocab_size).amin(dim=1, keepdim=True)
    second = kept_scores.scatter(1, token, -torch.inf).amax(dim=1, keepdim=True)
    margin = best - second

    # What would have to move for the token to be dropped ...
    def mass_above(value: Tensor) -> Tensor:
        return torch.where(order > value, mass, 0.0).sum(dim=1, keepdim=True) / total

    logit = x.gather(1, token)
    is_top = logit == top
    margin = torch.minimum(margin, (logit - torch.maximum(top_k_next, top_p_next)) / temperature)
    margin = torch.minimum(margin, torch.where(is_top, torch.inf, (logit - min_p_floor) / temperature))
    margin = torch.minimum(margin, torch.where(is_top | ~is_top_p, torch.inf, top_p - mass_above(logit)))
    # ... or for a better one to be kept.
    is_rival = ~is_kept & (scores > best)
    rival = torch.where(is_rival, x, -torch.inf).amax(dim=1, keepdim=True)
    to_top_p = torch.minimum((top_p_floor - rival) / temperature, mass_above(rival) - top_p)
    entry = torch.where(rival < top_k_floor, (top_k_floor - rival) / temperature, to_top_p)
    entry = torch.where(rival < min_p_floor, (min_p_floor - rival) / temperature, entry)
    margin = torch.minimum(margin, torch.where(rival > -torch.inf, entry, torch.inf)).clamp(min=0.0)

    # A sequence ends at its first row that is broken, last, or unequal to its draft.
    token, margin, is_row_finite = token[:, 0], margin[:, 0], is_row_finite[:, 0]
    index, owner = index.to(device), owner.to(device)
    first, num_sequences = rows.offsets[:-1].to(device), rows.temperature.numel()
    is_end = is_last | ~is_row_finite | (token != rows.draft_ids.to(device))
    end = torch.full((num_sequences,), num_rows, device=device)
    end = end.scatter_reduce(0, owner, torch.where(is_end, index, num_rows), "amin")
    is_finite = is_row_finite[end]
    is_valid = (index <= end[owner]) & is_row_finite
    return CoupledResult(
        tokens=torch.where(is_valid, token, 0),
        num_sampled=end - first + is_finite,
        margins=torch.where(is_valid, margin, torch.inf).float(),
        is_finite=is_finite,
    )
