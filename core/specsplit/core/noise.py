"""Defines the sampling noise, one number per (seed, position, token); knows no arrays and no sampling rule.

The noise is counter-based, so that any process can recompute any single value: Philox4x32-10 (Salmon, Moraes,
Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11) with

    key     = (seed mod 2^32, seed div 2^32)
    counter = (token div 4, position, purpose, 0)
    x       = output word (token mod 4)
    U       = (x + 1/2) / 2^32          exact in float64, never 0 and never 1
    G       = -log(-log U)              standard Gumbel, within (-3.13, 22.88)

The vectorised forms are in `specsplit.kernels.noise`; they agree with this file bit for bit in x and U.
"""

import math
from typing import Final

PHILOX_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS: Final = 10
WORDS_PER_COUNTER: Final = 4

# What a noise value is for. Values with different purposes are independent.
COUPLED: Final = 0
DRAFT: Final = 1
ACCEPT: Final = 2
RECOVERED: Final = 3
BONUS: Final = 4

_MASK32: Final = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One Philox4x32-10 block: four 32-bit words from a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        product0 = PHILOX_MULTIPLIERS[0] * c0
        product1 = PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0 = (k0 + PHILOX_KEY_STEPS[0]) & _MASK32
        k1 = (k1 + PHILOX_KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def noise_word(seed: int, position: int, token: int, purpose: int = COUPLED) -> int:
    """The 32 random bits of one token; `position` is the number of output tokens before this one."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: {seed} is not an unsigned 64-bit number")
    if not 0 <= position < 1 << 32:
        raise ValueError(f"position: {position} is not an unsigned 32-bit number")
    counter = (token // WORDS_PER_COUNTER, position, purpose, 0)
    return philox4x32(counter, (seed & _MASK32, seed >> 32))[token % WORDS_PER_COUNTER]


def uniform(word: int) -> float:
    """U in (0, 1) of 32 random bits."""
    return (word + 0.5) * 2.0**-32


def gumbel(seed: int, position: int, token: int, purpose: int = COUPLED) -> float:
    """G(seed, position, token)."""
    return -math.log(-math.log(uniform(noise_word(seed, position, token, purpose))))
