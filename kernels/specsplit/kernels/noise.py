"""Computes the noise of `specsplit.core.noise` for whole vocabularies; does not know what the noise decides.

Two forms of one definition: torch (any device, 32-bit words held in int64) and numba (CPU, one block of
tokens at a time, meant to be called from another numba kernel).
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specsplit.core.noise import COUPLED, PHILOX_KEY_STEPS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS
from specsplit.kernels.jit import jit

_MASK32: Final = 0xFFFFFFFF


def noise_words(seed: Tensor, position: Tensor, vocab_size: int, purpose: int = COUPLED) -> Tensor:
    """x for every token: int64 [rows, vocab_size] from int64 [rows] seeds (64-bit patterns) and positions."""
    num_counters = -(-vocab_size // 4)
    key0 = (seed & _MASK32)[:, None]
    key1 = ((seed >> 32) & _MASK32)[:, None]
    c0 = torch.arange(num_counters, dtype=torch.int64, device=seed.device)[None, :]  # [1, counters]
    c1 = position[:, None]  # [rows, 1]; the four words broadcast to [rows, counters] as they mix
    c2 = torch.full_like(key0, purpose)
    c3 = torch.zeros_like(key0)
    for _ in range(PHILOX_ROUNDS):
        # The product wraps modulo 2^64, which is the unsigned product's bit pattern.
        product0 = c0 * PHILOX_MULTIPLIERS[0]
        product1 = c2 * PHILOX_MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK32) ^ c1 ^ key0
        c1 = product1 & _MASK32
        c2 = ((product0 >> 32) & _MASK32) ^ c3 ^ key1
        c3 = product0 & _MASK32
        key0 = (key0 + PHILOX_KEY_STEPS[0]) & _MASK32
        key1 = (key1 + PHILOX_KEY_STEPS[1]) & _MASK32
    return torch.stack((c0, c1, c2, c3), dim=2).flatten(1)[:, :vocab_size]


def uniform(words: Tensor) -> Tensor:
    """U in (0, 1), float64, exact."""
    return (words.double() + 0.5) * 2.0**-32


def gumbel(seed: Tensor, position: Tensor, vocab_size: int, purpose: int = COUPLED) -> Tensor:
    """G for every token: float64 [rows, vocab_size]."""
    return -torch.log(-torch.log(uniform(noise_words(seed, position, vocab_size, purpose))))


# A block is the unit for which noise is made and skipped. 64 tokens: a bound per block costs little beside
# its words, and the block's largest noise seldom lifts an improbable block over the best score.
BLOCK_TOKENS: Final = 64
_BLOCK_COUNTERS: Final = BLOCK_TOKENS // 4

_M0 = np.uint64(PHILOX_MULTIPLIERS[0])
_M1 = np.uint64(PHILOX_MULTIPLIERS[1])
_W0 = np.uint64(PHILOX_KEY_STEPS[0])
_W1 = np.uint64(PHILOX_KEY_STEPS[1])
_LOW = np.uint64(_MASK32)
_HALF = np.uint64(32)


@jit()
def block_words(
    block: int, seed: np.uint64, position: np.uint64, purpose: np.uint64, words: npt.NDArray[np.uint32]
) -> np.uint32:
    """Writes x of tokens 64 * block ... into words [64] and returns the largest.

    Token t's word lies at (t % 4) * 16 + t % 64 // 4: word-major, so that the loop over counters vectorises.
    """
    first = np.uint64(block * _BLOCK_COUNTERS)
    largest = np.uint32(0)
    for i in range(_BLOCK_COUNTERS):
        k0 = seed & _LOW
        k1 = seed >> _HALF
        c0 = first + np.uint64(i)
        c1 = position
        c2 = purpose
        c3 = np.uint64(0)
        for _ in range(PHILOX_ROUNDS):
            product0 = _M0 * c0
            product1 = _M1 * c2
            c0 = (product1 >> _HALF) ^ c1 ^ k0
            c1 = product1 & _LOW
            c2 = (product0 >> _HALF) ^ c3 ^ k1
            c3 = product0 & _LOW
            k0 = (k0 + _W0) & _LOW
            k1 = (k1 + _W1) & _LOW
        words[i] = np.uint32(c0)
        words[i + _BLOCK_COUNTERS] = np.uint32(c1)
        words[i + 2 * _BLOCK_COUNTERS] = np.uint32(c2)
        words[i + 3 * _BLOCK_COUNTERS] = np.uint32(c3)
    for i in range(BLOCK_TOKENS):
        largest = max(largest, words[i])
    return largest


@jit()
def word_uniform(word: np.uint32) -> float:
    """U of one word."""
    return (np.float64(word) + 0.5) * 2.0**-32


@jit()
def word_gumbel(word: np.uint32) -> float:
    """G of one word; increasing in the word."""
    return float(-np.log(-np.log(word_uniform(word))))
