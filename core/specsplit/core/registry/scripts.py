"""What the registry's keys are called and what its Lua scripts ask and answer. Knows no connection.

The scripts beside this file are the registry: each is one atomic round trip. They run on Redis 6.2 and later
and on Valkey, so they are scripts, not functions. All keys of a namespace hash to one cluster slot.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path

from specsplit.core.block_hash import BLOCK_HASH_BYTES

_FOLDER = Path(__file__).parent
_PRELUDE = (_FOLDER / "prelude.lua").read_text()


@dataclass(frozen=True, slots=True)
class Script:
    """Source and the digest under which a server keeps it once it has run."""

    source: str
    sha: str


def _load(name: str) -> Script:
    source = _PRELUDE + (_FOLDER / f"{name}.lua").read_text()
    return Script(source, sha1(source.encode()).hexdigest())


REGISTER = _load("register")
APPLY = _load("apply")
SNAPSHOT_PART = _load("snapshot_part")
SNAPSHOT_SWAP = _load("snapshot_swap")
HEARTBEAT = _load("heartbeat")
LEAVE = _load("leave")
LOOKUP = _load("lookup")


class Answer(enum.Enum):
    """What a fenced script says; only OK has changed what is published."""

    OK = b"OK"
    DUPLICATE = b"DUPLICATE"  # this very seq was applied before
    STALE = b"STALE"  # an older seq than the one held
    GAP = b"GAP"  # something in between is missing, or what is held is not what was published
    WRONG_INCARNATION = b"WRONG_INCARNATION"  # another process has the name
    UNKNOWN = b"UNKNOWN"  # the name is not registered: expired, flushed, or never was


class ReplicaState(enum.Enum):
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ReplicaKeys:
    """The keys of one incarnation of one replica."""

    prefix: str
    name: str
    members: str
    replica: str
    blocks: str

    @classmethod
    def of(cls, namespace: bytes, name: str, incarnation: bytes) -> ReplicaKeys:
        prefix = namespace_prefix(namespace)
        return cls(
            prefix=prefix,
            name=name,
            members=members_key(namespace),
            replica=f"{prefix}r:{name}",
            blocks=f"{prefix}b:{name}:{incarnation.hex()}",
        )

    def collected(self, seq: int) -> str:
        """Where the snapshot with that seq is collected."""
        return f"{self.blocks}:{seq}"


def namespace_prefix(namespace: bytes) -> str:
    return f"kv:{{{namespace.hex()}}}:"


def members_key(namespace: bytes) -> str:
    return f"{namespace_prefix(namespace)}reps"


def parse_lookup(answer: object) -> dict[bytes, int]:
    """Leading blocks by incarnation; raises ValueError for anything that the lookup script does not say."""
    if not isinstance(answer, bytes):
        raise ValueError(f"not a text: {answer!r:.100}")
    words = answer.decode().split()
    return {
        bytes.fromhex(incarnation): int(num_leading)
        for incarnation, num_leading in zip(words[::2], words[1::2], strict=True)
    }


def joined(hashes: list[bytes]) -> bytes:
    """The form in which scripts take hashes."""
    blob = b"".join(hashes)
    assert len(blob) == BLOCK_HASH_BYTES * len(hashes), "a hash has another length"
    return blob
