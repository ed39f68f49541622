"""Block hashes: equal in every process, different whenever the KV or who may share it differs."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations

import pytest

from specsplit.core.block_hash import (
    BLOCK_HASH_BYTES,
    block_hashes,
    child_hash,
    namespace,
    request_root,
    root_hash,
)

FIELDS = {
    "model": "m",
    "revision": "r",
    "tokenizer_digest": "t",
    "kv_dtype": "float32",
    "block_size": 16,
}

CHAIN = """
from specsplit.core.block_hash import child_hash, namespace, request_root
ns = namespace(model="m", revision="r", tokenizer_digest="t", kv_dtype="float32", block_size=16)
hashes = [request_root(ns, cache_salt=b"salt")]
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


def test_a_salt_shares_nothing_with_another_field_of_the_same_text() -> None:
    """Case 18: an adapter, a tenant and a client's salt of one text, and texts that imitate two fields."""
    ns = namespace(**FIELDS)  # type: ignore[arg-type]
    imitation = b"x" + b"\x06\x00tenant" + b"\x01\x00\x00\x00y"
    ways = [
        root_hash(ns, extras)
        for extras in (
            {},
            {"cache_salt": b""},
            {"cache_salt": b"x"},
            {"adapter": b"x"},
            {"tenant": b"x"},
            {"cache_salt": b"x", "tenant": b"y"},
            {"cache_salt": b"y", "tenant": b"x"},
            {"cache_salt": imitation},
        )
    ]
    assert len(set(ways)) == len(ways)
    assert root_hash(ns, {"tenant": b"y", "cache_salt": b"x"}) == ways[5]  # whatever the order
    assert request_root(ns, cache_salt=b"x") == ways[2]


def test_the_hashes_of_a_prompt_are_those_of_its_full_blocks() -> None:
    ns = namespace(**FIELDS)  # type: ignore[arg-type]
    first = child_hash(request_root(ns, cache_salt=b"s"), range(16))
    expected = [first, child_hash(first, range(16, 32))]
    for length, num_blocks in ((0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (47, 2)):
        found = block_hashes(ns, list(range(length)), block_size=16, cache_salt=b"s")
        assert found == expected[:num_blocks]


def test_chains_share_exactly_their_common_prefix() -> None:
    ns = namespace(**FIELDS)  # type: ignore[arg-type]
    roots = [request_root(ns, cache_salt=salt) for salt in (b"", b"a", b"ab", b"\x00")]
    assert all(a != b for a, b in combinations(roots, 2))
    first = child_hash(roots[0], range(16))
    assert first == child_hash(roots[0], list(range(16)))
    assert first != child_hash(roots[1], range(16))
    assert child_hash(first, range(16)) != first
    assert child_hash(first, [1] * 16) != child_hash(first, [1] * 15 + [2])
    assert len(first) == len(roots[0]) == BLOCK_HASH_BYTES
