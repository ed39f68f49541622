"""The digest of committed ids: defined bytes, cheap appends, loud on what is no id."""

from __future__ import annotations

import struct
from hashlib import blake2b, sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsplit.core.digest import TokenDigest, pack_ids, tokenizer_digest

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=50)


@given(IDS)
def test_it_is_blake2b_64_over_u32_little_endian(ids: list[int]) -> None:
    packed = struct.pack(f"<{len(ids)}I", *ids)
    assert pack_ids(ids) == packed
    assert TokenDigest(ids).value == int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


@given(IDS, IDS)
def test_appending_equals_the_whole(first: list[int], second: list[int]) -> None:
    grown = TokenDigest(first)
    assert grown.value == TokenDigest(first).value  # reading it changes nothing
    grown.append(second)
    assert grown.value == TokenDigest(first + second).value


def test_known_value() -> None:
    assert TokenDigest([1, 2, 3]).value == TokenDigest((1, 2, 3)).value != TokenDigest([1, 2, 3, 0]).value
    assert TokenDigest().value == int.from_bytes(blake2b(b"", digest_size=8).digest(), "little")


@pytest.mark.parametrize("id_", [-1, 2**32])
def test_what_is_no_id_raises(id_: int) -> None:
    with pytest.raises(OverflowError):
        TokenDigest([id_])


def test_tokenizer_digest_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b"{}")
    assert tokenizer_digest(file) == sha256(b"{}").hexdigest()[:16]
