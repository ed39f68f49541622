"""Hash chain of KV blocks: which token prefix a block holds, equal in every process.

Knows no memory and no Redis.

ns = sha256(schema, model revision, tokenizer digest, kv dtype, block size)[:8]
h0 = sha256(ns, typed length-prefixed extras)
h_i = sha256(h_{i-1}, u32le tokens of block i)[:16]
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from specsplit.core.digest import pack_ids
from specsplit.core.types import TokenIds

SCHEMA = b"specsplit-kv-1"
BLOCK_HASH_BYTES = 16


def _typed(kind: bytes, value: bytes) -> bytes:
    """Type and length before each value: no two different field lists give the same bytes."""
    return len(kind).to_bytes(2, "little") + kind + len(value).to_bytes(4, "little") + value


def namespace(*, model: str, revision: str, tokenizer_digest: str, kv_dtype: str, block_size: int) -> bytes:
    """8 bytes that differ whenever the KV of equal tokens could differ."""
    fields = (
        _typed(b"schema", SCHEMA)
        + _typed(b"model", model.encode())
        + _typed(b"revision", revision.encode())
        + _typed(b"tokenizer", tokenizer_digest.encode())
        + _typed(b"kv_dtype", kv_dtype.encode())
        + _typed(b"block_size", str(block_size).encode())
    )
    return sha256(fields).digest()[:8]


def root_hash(ns: bytes, extras: Mapping[str, bytes]) -> bytes:
    """Parent of the first block; requests share blocks only when all their extras are equal, name by name."""
    fields = b"".join(_typed(name.encode(), extras[name]) for name in sorted(extras))
    return sha256(ns + fields).digest()[:BLOCK_HASH_BYTES]


def request_root(ns: bytes, *, cache_salt: bytes) -> bytes:
    """The root of a request's chain, in the gateway and in the verifier alike."""
    return root_hash(ns, {"cache_salt": cache_salt})


def child_hash(parent: bytes, block_ids: TokenIds) -> bytes:
    """Hash of a full block that follows the block hashed `parent`."""
    return sha256(parent + pack_ids(block_ids)).digest()[:BLOCK_HASH_BYTES]


def block_hashes(ns: bytes, ids: TokenIds, *, block_size: int, cache_salt: bytes) -> list[bytes]:
    """Hashes of the full blocks of `ids`, first block first."""
    hashes = []
    parent = request_root(ns, cache_salt=cache_salt)
    for start in range(0, len(ids) - block_size + 1, block_size):
        parent = child_hash(parent, ids[start : start + block_size])
        hashes.append(parent)
    return hashes
