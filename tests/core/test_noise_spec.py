"""The noise's definition against the generator's published test vectors."""

from __future__ import annotations

import math

import pytest

from specsplit.core import noise

# Known answers of Philox4x32-10 as published with its authors' library.
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert noise.philox4x32(counter, key) == words


def test_words_of_one_counter_go_to_four_tokens() -> None:
    words = noise.philox4x32((5, 7, noise.COUPLED, 0), (3, 9))
    assert tuple(noise.noise_word(3 + (9 << 32), 7, token) for token in range(20, 24)) == words


def test_uniform_is_never_0_or_1_and_gumbel_finite() -> None:
    for word in (0, ONES):
        value = noise.uniform(word)
        assert 0 < value < 1
        assert math.isfinite(-math.log(-math.log(value)))


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_out_of_range_raises(seed: int, position: int) -> None:
    with pytest.raises(ValueError, match="unsigned"):
        noise.noise_word(seed, position, 0)
