"""What the whole registry holds, for people. Not for the request path: it asks once per namespace."""

from __future__ import annotations

from typing import Any

import redis

from specsplit.core.registry.scripts import (
    LOOKUP,
    RegisteredReplica,
    members_key,
    namespace_prefix,
    parse_lookup,
)

_MAX_NAMESPACES = 1000


def read_replicas(client: redis.Redis) -> dict[bytes, list[RegisteredReplica]]:
    """The replicas of each namespace; raises redis.RedisError when the server does not answer."""
    found: dict[bytes, list[RegisteredReplica]] = {}
    for key in client.scan_iter(match="kv:{*}:reps", count=1000):
        namespace = bytes.fromhex(key.decode().split("{")[1].split("}")[0])
        answer: Any = client.eval(LOOKUP.source, 1, members_key(namespace), namespace_prefix(namespace), b"")
        found[namespace] = sorted(parse_lookup(answer), key=lambda replica: replica.name)
        if len(found) == _MAX_NAMESPACES:
            break
    return found
