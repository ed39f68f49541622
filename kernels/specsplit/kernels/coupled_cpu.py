"""Runs coupled verification on the CPU, in numba over plain arrays; does not know torch or what a request is.

`specsplit.kernels.coupled` holds the rule, its reference and the checks of what arrives here. A sequence's
rows are sampled in order, only as far as the drafts agree. Noise is made for a block of 64 tokens at a time,
if its largest logit could still win; logarithms are taken only for tokens whose 32 bits are large enough.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specsplit.core.noise import COUPLED
from specsplit.kernels.jit import jit
from specsplit.kernels.logit_order_cpu import Logits, block_maxima, boundary, mass_above
from specsplit.kernels.noise import BLOCK_TOKENS, block_words, word_gumbel

_INF: Final = np.inf
_MAX_GUMBEL: Final = 22.88  # rounded up
_PURPOSE = np.uint64(COUPLED)


@jit()
def _greedy(row: Logits, block_max: Logits, top: float) -> tuple[int, float]:
    """The lowest id with the largest logit, and its lead over the next."""
    token = -1
    second = -_INF
    for block in range(block_max.size):
        if block_max[block] <= second:
            continue
        if token >= 0 or block_max[block] < top:
            second = max(second, np.float64(block_max[block]))
            continue
        for i in range(block * BLOCK_TOKENS, min(row.size, (block + 1) * BLOCK_TOKENS)):
            if token < 0 and row[i] == top:
                token = i
            else:
                second = max(second, np.float64(row[i]))
    return token, top - second


@jit()
def _least_word(gap: float) -> int:
    """A word below which G < gap, from U > exp(-exp(-gap)); rounded down by one or two, never up."""
    return max(int(np.exp(-np.exp(-gap)) * 4294967296.0 - 2.0), 0)


@jit()
def _best_kept(
    row: Logits,
    block_max: Logits,
    floor: float,
    temperature: float,
    seed: np.uint64,
    position: np.uint64,
    words: npt.NDArray[np.uint32],
) -> tuple[int, float, float]:
    """The token with the largest logit / temperature + G among those not below floor; the two best scores."""
    token = -1
    best = -_INF
    second = -_INF
    for block in range(block_max.size):
        top = block_max[block] / temperature
        if block_max[block] < floor or top + _MAX_GUMBEL <= second:
            continue
        largest = block_words(block, seed, position, _PURPOSE, words)
        least = _least_word(second - top)
        if largest < least:
            continue
        first = block * BLOCK_TOKENS
        for i in range(first, min(row.size, first + BLOCK_TOKENS)):
            word = words[i % 4 * (BLOCK_TOKENS // 4) + (i - first) // 4]
            if word >= least and row[i] >= floor:
                score = row[i] / temperature + word_gumbel(word)
                if score > best:
                    token, second, best = i, best, score
                elif score > second:
                    second = score
    return token, best, second


@jit()
def _nearest_dropped(
    row: Logits,
    block_max: Logits,
    floor: float,
    best: float,
    temperature: float,
    seed: np.uint64,
    position: np.uint64,
    words: npt.NDArray[np.uint32],
) -> float:
    """The largest logit below floor whose score beats `best` (it would win had it been kept), or -inf."""
    found = -_INF
    for block in range(block_max.size):
        top = min(np.float64(block_max[block]), floor) / temperature
        if block_max[block] <= found or top + _MAX_GUMBEL <= best:
            continue
        largest = block_words(block, seed, position, _PURPOSE, words)
        least = _least_word(best - top)
        if largest < least:
            continue
        first = block * BLOCK_TOKENS
        for i in range(first, min(row.size, first + BLOCK_TOKENS)):
            word = words[i % 4 * (BLOCK_TOKENS // 4) + (i - first) // 4]
            is_candidate = word >= least and found < row[i] < floor
            if is_candidate and row[i] / temperature + word_gumbel(word) > best:
                found = np.float64(row[i])
    return found


@jit()
def _sample(
    row: Logits,
    block_max: Logits,
    top: float,
    temperature: float,
    top_k: int,
    top_p: float,
    log_min_p: float,
    seed: np.uint64,
    position: np.uint64,
    words: npt.NDArray[np.uint32],
) -> tuple[int, float]:
    """One row's token and margin."""
    # Each filter keeps the logits at or above a value: min_p first, then top_k, then top_p on what is left.
    min_p_floor = top + temperature * log_min_p
    top_k_floor, top_k_next, top_p_floor, top_p_next, total = -_INF, -_INF, -_INF, -_INF, 0.0
    if 0 < top_k < row.size:
        top_k_floor, top_k_next, _ = boundary(
            row, block_max, min_p_floor, top, temperature, np.float64(top_k)
        )
    if top_p < 1.0:
        rest = max(min_p_floor, top_k_floor)
        top_p_floor, top_p_next, total = boundary(row, block_max, rest, top, temperature, top_p)
    floor = max(min_p_floor, top_k_floor, top_p_floor)

    token, best, second = _best_kept(row, block_max, floor, temperature, seed, position, words)
    margin = best - second
    if floor == -_INF:
        return token, margin

    # What would have to move for the token to be dropped ...
    rest = max(min_p_floor, top_k_floor)
    logit = np.float64(row[token])
    margin = min(margin, (logit - max(top_k_next, top_p_next)) / temperature)
    if logit < top:
        margin = min(margin, (logit - min_p_floor) / temperature)
        if top_p < 1.0:
            mass = mass_above(row, block_max, logit, rest, top, temperature)
            margin = min(margin, top_p - mass / total)
    # ... or for a better one to be kept.
    rival = _nearest_dropped(row, block_max, floor, best, temperature, seed, position, words)
    if rival > -_INF:
        if rival < min_p_floor:
            margin = min(margin, (min_p_floor - rival) / temperature)
        elif rival < top_k_floor:
            margin = min(margin, (top_k_floor - rival) / temperature)
        else:
            mass = mass_above(row, block_max, rival, rest, top, temperature)
            margin = min(margin, (top_p_floor - rival) / temperature, mass / total - top_p)
    return token, max(margin, 0.0)


@jit()
def _verify_share(
    share: int,
    num_shares: int,
    logits: Logits,  # [N, V]
    offsets: npt.NDArray[np.int64],  # [R + 1]
    draft_ids: npt.NDArray[np.int64],  # [N]
    temperature: npt.NDArray[np.float64],  # [R], as are all that follow up to position
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    log_min_p: npt.NDArray[np.float64],
    seed: npt.NDArray[np.uint64],
    position: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],  # [N] out, as are all that follow
    margins: Logits,  # [N]
    num_sampled: npt.NDArray[np.int64],  # [R]
    is_finite: npt.NDArray[np.bool_],  # [R]
) -> None:
    """Samples sequences share, share + num_shares, ... row by row, as long as the tokens equal the drafts."""
    block_max = np.empty(
        (logits.shape[1] + BLOCK_TOKENS - 1) // BLOCK_TOKENS, np.float32
    )  # written whole for each row
    words = np.empty(BLOCK_TOKENS, np.uint32)  # written whole for each block
    for r in range(share, temperature.size, num_shares):
        is_finite[r] = True
        for n in range(offsets[r], offsets[r + 1]):
            row = logits[n]
            top = block_maxima(row, block_max)
            if np.isnan(top):
                is_finite[r] = False
                break
            if temperature[r] == 0.0 or not np.isfinite(top / temperature[r]):
                token, margin = _greedy(row, block_max, top)
            else:
                at = np.uint64(position[r] + num_sampled[r])
                token, margin = _sample(
                    row, block_max, top, temperature[r], top_k[r], top_p[r], log_min_p[r], seed[r], at, words
                )
            tokens[n] = token
            margins[n] = margin
            num_sampled[r] += 1
            if token != draft_ids[n]:
                break


@functools.cache
def _helpers(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="coupled")


def verify_batch(num_threads: int, num_sequences: int, *arrays: npt.NDArray[Any]) -> None:
    """Verifies every sequence, on the calling thread and at most num_threads - 1 more (see _verify_share).

    Plain threads over a nogil kernel, not numba's parallel loops: those bring a second OpenMP pool, whose
    spinning barriers compete with torch's (on busy cores without a passive wait policy, 8 ms for a tiny row).
    """
    num_shares = max(1, min(num_threads, num_sequences))
    futures = [
        _helpers(num_threads - 1).submit(_verify_share, share, num_shares, *arrays)
        for share in range(1, num_shares)
    ]
    _verify_share(0, num_shares, *arrays)
    for future in futures:
        future.result()
