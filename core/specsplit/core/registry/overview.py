"""What the whole registry holds, for people. Not for the request path: it takes several round trips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from specsplit.core.registry.scripts import namespace_prefix

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
    """The replicas of each namespace, by name; raises redis.RedisError when the server does not answer.

    What no replica wrote, or has vanished meanwhile, is passed over.
    """
    found: dict[bytes, list[RegisteredReplica]] = {}
    for key in client.scan_iter(match="kv:{*}:reps", count=1000, _type="SET"):
        try:
            namespace = bytes.fromhex(key.decode().split("{")[1].split("}")[0])
        except ValueError:
            continue
        members: Any = client.smembers(key)
        replicas = (_read(client, namespace, name) for name in sorted(members))
        found[namespace] = [replica for replica in replicas if replica is not None]
        if len(found) == _MAX_NAMESPACES:
            break
    return found


def _read(client: redis.Redis, namespace: bytes, name: bytes) -> RegisteredReplica | None:
    try:
        held: Any = client.hgetall(f"{namespace_prefix(namespace)}r:{name.decode()}")
        fields = {key.decode(): value.decode() for key, value in held.items()}
        return RegisteredReplica(
            name=name.decode(),
            incarnation=bytes.fromhex(fields["incarnation"]),
            address=fields["address"],
            state=fields["state"],
            seq=int(fields["seq"]),
            num_blocks=int(fields["blocks"]),
        )
    except (KeyError, ValueError, redis.ResponseError):
        return None
