"""Finds where the sorted order of a row of logits crosses a rank or a share of the mass; does not know why.

CPU, numba. Nothing sorts the vocabulary: a row's blocks of 64 tokens carry their largest logit, a block is
read only when that can matter, and only the tokens of one narrow bin are ever put in order.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from specsplit.kernels.jit import jit
from specsplit.kernels.noise import BLOCK_TOKENS

Logits = npt.NDArray[np.float32]

_INF: Final = np.inf

# Sorted order is found by counting in bins below the maximum: 1/16 logit (or nat) each, the last one open.
_NUM_BINS: Final = 1024
_BINS_PER_UNIT: Final = 16.0
# A token farther below the maximum has no mass beside float64 rounding; its distance is cut.
_MAX_NATS: Final = 64.0
_LN2_HIGH: Final = 0.6931471803691238  # ln 2 in two parts; the first ends in zeros, so that n * it is exact
_LN2_LOW: Final = 1.9082149292705877e-10
_EXP_SERIES: Final = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))

# float32 bit patterns, made to order like the numbers: NaN of either sign lies outside [-inf, inf].
_KEY_MASK = np.int32(0x7FFFFFFF)
_KEY_SHIFT = np.int32(31)
_KEY_MIN = np.int32(-(2**31))
_KEY_INF = np.int32(0x7F800000)
_KEY_NEG_INF = np.int32(-0x7F800001)


@jit()
def block_maxima(row: Logits, block_max: Logits) -> float:
    """Writes each block's largest logit; returns the row's, or NaN if the row is broken.

    Broken is a row that holds NaN or +inf, or nothing but -inf.
    """
    bits = row.view(np.int32)
    keys = block_max.view(np.int32)
    lowest = _KEY_INF
    highest = _KEY_MIN
    top = 0
    for block in range(block_max.size):
        block_high = _KEY_MIN
        for i in range(block * BLOCK_TOKENS, min(row.size, (block + 1) * BLOCK_TOKENS)):
            key = np.int32(bits[i] ^ np.int32(np.int32(bits[i] >> _KEY_SHIFT) & _KEY_MASK))
            block_high = max(block_high, key)
            lowest = min(lowest, key)
        if block_high > highest:
            highest = block_high
            top = block
        keys[block] = np.int32(block_high ^ np.int32(np.int32(block_high >> _KEY_SHIFT) & _KEY_MASK))
    is_usable = lowest >= _KEY_NEG_INF and _KEY_NEG_INF < highest < _KEY_INF
    return np.float64(block_max[top]) if is_usable else np.nan


@jit()
def largest_below(row: Logits, block_max: Logits, limit: float, floor: float) -> float:
    """The largest logit in [floor, limit), or -inf."""
    found = -_INF
    for block in range(block_max.size):
        if block_max[block] <= found or block_max[block] < floor:
            continue
        if block_max[block] < limit:
            found = np.float64(block_max[block])
            continue
        for i in range(block * BLOCK_TOKENS, min(row.size, (block + 1) * BLOCK_TOKENS)):
            if found < row[i] < limit and row[i] >= floor:
                found = np.float64(row[i])
    return found


@jit()
def _block_masses(
    row: Logits,
    block: int,
    top: float,
    temperature: float,
    mass: npt.NDArray[np.float64],
    scale: npt.NDArray[np.int64],
) -> None:
    """mass[i] = exp((logit - top) / temperature) for a block's tokens; mass and scale are [64].

    exp(z) = 2^n exp(t), n = round(z / ln 2), |t| <= ln(2) / 2, exp(t) by its series to t^13 / 13!:
    written out because a call of the C library per token is not vectorised. 2^n is made as a bit pattern.
    """
    first = block * BLOCK_TOKENS
    num = min(row.size - first, BLOCK_TOKENS)
    for i in range(num):
        z = max((row[first + i] - top) / temperature, -_MAX_NATS)
        n = np.floor(z * 1.4426950408889634 + 0.5)
        t = z - n * _LN2_HIGH - n * _LN2_LOW
        series = _EXP_SERIES[0]
        for coefficient in _EXP_SERIES[1:]:
            series = series * t + coefficient
        mass[i] = series
        scale[i] = np.int64(np.int32(n) + np.int32(1023)) << 52
    powers = scale.view(np.float64)
    for i in range(num):
        mass[i] *= powers[i]


@jit()
def mass_above(
    row: Logits, block_max: Logits, limit: float, floor: float, top: float, temperature: float
) -> float:
    """Sum of exp((logit - top) / temperature) over logits above limit and not below floor."""
    mass = np.empty(BLOCK_TOKENS, np.float64)  # written for each block, as far as it is read
    scale = np.empty(BLOCK_TOKENS, np.int64)
    total = 0.0
    for block in range(block_max.size):
        if block_max[block] <= limit or block_max[block] < floor:
            continue
        _block_masses(row, block, top, temperature, mass, scale)
        first = block * BLOCK_TOKENS
        for i in range(min(row.size - first, BLOCK_TOKENS)):
            if row[first + i] > limit and row[first + i] >= floor:
                total += mass[i]
    return total


@jit()
def _sink(heap: npt.NDArray[np.float64], size: int, node: int) -> None:
    """Restores the max-heap order of heap[:size] below one node."""
    while 2 * node + 1 < size:
        child = 2 * node + 1
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[node] >= heap[child]:
            return
        heap[node], heap[child] = heap[child], heap[node]
        node = child


@jit()
def boundary(
    row: Logits, block_max: Logits, floor: float, top: float, temperature: float, target: float
) -> tuple[float, float, float]:
    """Walks the logits not below floor, largest first, to `target` tokens or (if < 1) a share of the mass.

    Returns the logit reached, the next one in order (equal to it if tied, -inf if none) and the mass of all.
    """
    is_count = target >= 1.0
    bins_per_logit = (
        _BINS_PER_UNIT if is_count else min(_BINS_PER_UNIT / temperature, 1e300)
    )  # 0 * inf is NaN
    weights = np.zeros(_NUM_BINS, np.float64)
    counts = np.zeros(_NUM_BINS, np.int64)
    mass = np.ones(BLOCK_TOKENS, np.float64)
    scale = np.zeros(BLOCK_TOKENS, np.int64)
    for block in range(block_max.size):
        if block_max[block] < floor:
            continue
        if not is_count:
            _block_masses(row, block, top, temperature, mass, scale)
        first = block * BLOCK_TOKENS
        for i in range(min(row.size - first, BLOCK_TOKENS)):
            logit = row[first + i]
            if logit >= floor and logit > -_INF:
                slot = int(min((top - logit) * bins_per_logit, _NUM_BINS - 1.0))
                counts[slot] += 1
                weights[slot] += mass[i]
    total = 0.0
    last = 0
    for slot in range(_NUM_BINS):
        total += weights[slot]
        if counts[slot] > 0:
            last = slot
    if not is_count:
        target *= total

    slot = 0
    passed = 0.0
    while slot < last and passed + weights[slot] < target:
        passed += weights[slot]
        slot += 1

    # The logits of that bin, as a heap. Its lower edge, with room for rounding, says which blocks to read.
    heap = np.zeros(counts[slot], np.float64)
    size = 0
    edge = top - (slot + 1) / bins_per_logit
    edge = -_INF if slot == _NUM_BINS - 1 else edge - (abs(edge) + abs(top)) * 1e-12
    for block in range(block_max.size):
        if block_max[block] < floor or block_max[block] < edge:
            continue
        for i in range(block * BLOCK_TOKENS, min(row.size, (block + 1) * BLOCK_TOKENS)):
            is_candidate = row[i] >= floor and row[i] >= edge and row[i] > -_INF
            if is_candidate and int(min((top - row[i]) * bins_per_logit, _NUM_BINS - 1.0)) == slot:
                heap[size] = row[i]
                size += 1
    assert size == counts[slot]
    for node in range(size // 2 - 1, -1, -1):
        _sink(heap, size, node)
    while True:
        reached = heap[0]
        passed += 1.0 if is_count else np.exp((reached - top) / temperature)
        size -= 1
        if size == 0:
            return reached, largest_below(row, block_max, reached, floor), total
        heap[0] = heap[size]
        _sink(heap, size, 0)
        if passed >= target:
            return reached, heap[0], total
