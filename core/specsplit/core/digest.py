"""The digest of committed ids that fences every row: BLAKE2b-64 over u32 little-endian ids."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b, sha256
from pathlib import Path

assert array("I").itemsize == 4, "array('I') must hold 32-bit ids"


def pack_ids(ids: Iterable[int]) -> bytes:
    """u32 little-endian bytes of `ids`; raises OverflowError for an id outside [0, 2**32)."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class TokenDigest:
    """Digest of a growing token sequence; appending costs only the new tokens."""

    __slots__ = ("_hash",)

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._hash = blake2b(pack_ids(ids), digest_size=8)

    def append(self, ids: Iterable[int]) -> None:
        self._hash.update(pack_ids(ids))

    @property
    def value(self) -> int:
        """64-bit unsigned."""
        return int.from_bytes(self._hash.digest(), "little")


def tokenizer_digest(tokenizer_file: Path) -> str:
    """First 16 hex digits of the file's SHA-256: equal digests mean equal token ids in every process."""
    return sha256(tokenizer_file.read_bytes()).hexdigest()[:16]
