"""Block hashes: equal in every process, different whenever the KV or who may share it differs."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations

import pytest

from specsplit.core.block_hash import BLOCK_HASH_BYTES, child_hash, namespace, root_hash

FIELDS = {
    "model": "m",
    "revision": "r",
    "tokenizer_digest": "t",
    "kv_dtype": "float32",
    "block_size": 16,
}

CHAIN = """
from specsplit.core.block_hash import child_hash, namespace, root_hash
ns = namespace(model="m", revision="r", tokenizer_digest="t", kv_dtype="float32", block_size=16)
hashes = [root_hash(ns, cache_salt=b"salt")]
for block in range(4):
    hashes.append(child_hash(hashes[-1], range(16 * block, 16 * block + 16)))
print(ns.hex(), *[h.hex() for h in hashes])
"""


def test_two_fresh_processes_agree_whatever_their_hash_seed() -> None:
    """Case 16."""
    outputs = []
    for seed in ("1", "2", None):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        outputs.append(subprocess.check_output([sys.executable, "-c", CHAIN], env=environment))
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_changes_the_namespace(name: str) -> None:
    changed = {**FIELDS, name: 32 if name == "block_size" else f"{FIELDS[name]}x"}
    assert namespace(**changed) != namespace(**FIELDS)  # type: ignore[arg-type]
    assert len(namespace(**FIELDS)) == 8  # type: ignore[arg-type]


def test_text_moved_from_one_field_to_the_next_is_another_namespace() -> None:
    """Fields are typed and length-prefixed (case 18)."""
    ways = [
        namespace(model="ab", revision="", tokenizer_digest="", kv_dtype="", block_size=16),
        namespace(model="a", revision="b", tokenizer_digest="", kv_dtype="", block_size=16),
        namespace(model="", revision="ab", tokenizer_digest="", kv_dtype="", block_size=16),
        namespace(model="a", revision="", tokenizer_digest="b", kv_dtype="", block_size=16),
        namespace(model="a", revision="", tokenizer_digest="", kv_dtype="b", block_size=16),
        namespace(model="a\x08\x00revisionb", revision="", tokenizer_digest="", kv_dtype="", block_size=16),
    ]
    assert len(set(ways)) == len(ways)


def test_chains_share_exactly_their_common_prefix() -> None:
    ns = namespace(**FIELDS)  # type: ignore[arg-type]
    roots = [root_hash(ns, cache_salt=salt) for salt in (b"", b"a", b"ab", b"\x00")]
    assert all(a != b for a, b in combinations(roots, 2))
    first = child_hash(roots[0], range(16))
    assert first == child_hash(roots[0], list(range(16)))
    assert first != child_hash(roots[1], range(16))
    assert child_hash(first, range(16)) != first
    assert child_hash(first, [1] * 16) != child_hash(first, [1] * 15 + [2])
    assert len(first) == len(roots[0]) == BLOCK_HASH_BYTES
