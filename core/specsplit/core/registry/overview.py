"""What the whole registry holds, for people. Not for the request path: it takes several round trips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from specsplit.core.registry.scripts import members_key, namespace_prefix

_MAX_NAMESPACES = 1000


@dataclass(frozen=True, slots=True)
class RegisteredReplica:
    """One replica as the registry has it."""

    name: str
    incarnation: bytes
    address: str
    state: str
    seq: int
    num_blocks: int


def read_replicas(client: redis.Redis) -> dict[bytes, list[RegisteredReplica]]:
    """The replicas of each namespace, by name; raises redis.RedisError when the server does not answer."""
    found: dict[bytes, list[RegisteredReplica]] = {}
    for key in client.scan_iter(match="kv:{*}:reps", count=1000):
        namespace = bytes.fromhex(key.decode().split("{")[1].split("}")[0])
        members: Any = client.smembers(members_key(namespace))
        held = [(name.decode(), _hash(client, namespace, name.decode())) for name in sorted(members)]
        found[namespace] = [
            RegisteredReplica(
                name=name,
                incarnation=bytes.fromhex(fields["incarnation"]),
                address=fields["address"],
                state=fields["state"],
                seq=int(fields["seq"]),
                num_blocks=int(fields["blocks"]),
            )
            for name, fields in held
            if fields  # else it has vanished and nobody has cleared its name away yet
        ]
        if len(found) == _MAX_NAMESPACES:
            break
    return found


def _hash(client: redis.Redis, namespace: bytes, name: str) -> dict[str, str]:
    held: Any = client.hgetall(f"{namespace_prefix(namespace)}r:{name}")
    return {key.decode(): value.decode() for key, value in held.items()}
