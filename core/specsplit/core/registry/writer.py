"""One replica's side of the registry: each method is one round trip. Knows no threads and when to do what.

Every method raises redis.RedisError when the server does not answer, ValueError when it does not answer as a
registry, and may then have been done or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from specsplit.core.registry.scripts import (
    APPLY,
    HEARTBEAT,
    LEAVE,
    REGISTER,
    SNAPSHOT_PART,
    SNAPSHOT_SWAP,
    Answer,
    ReplicaKeys,
    ReplicaState,
    Script,
    joined,
)

_PART_BLOCKS = 4000  # about 2 ms of the server's time


def connect(url: str, *, timeout_seconds: float) -> redis.Redis:
    """A client that gives up after `timeout_seconds` and does not try again; connects when first used."""
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
    )


class RegistryWriter:
    """Publishes as `name`; of all processes with that name, only the `incarnation` that has it is heard."""

    def __init__(
        self,
        client: redis.Redis,
        *,
        namespace: bytes,
        name: str,
        address: str,
        incarnation: bytes,
        ttl_seconds: float,
    ) -> None:
        self._client = client
        self._keys = ReplicaKeys.of(namespace, name, incarnation)
        self._incarnation = incarnation.hex()
        self._address = address
        self._ttl_ms = int(ttl_seconds * 1000)

    def holder(self) -> str:
        """The incarnation that has the name, in hex; empty when nobody has."""
        try:
            held: Any = self._client.hget(self._keys.replica, "incarnation")
        except redis.ResponseError:  # of another type: nobody's, and registering replaces it
            return ""
        return held.decode() if held else ""

    def register(self, *, expected: str, state: ReplicaState, seq: int = 0) -> bool:
        """Takes the name from `expected`, an incarnation in hex or nobody; what that had published is gone.

        `seq` is the last one used by this incarnation: what it sent before and arrives late stays stale.
        False when somebody else has the name.
        """
        keys = self._keys
        answer = self._run(
            REGISTER,
            [keys.members, keys.replica],
            [
                *(keys.prefix, keys.name, self._incarnation, expected),
                *(self._address, state.value, self._ttl_ms, seq),
            ],
        )
        match answer:
            case b"OK":
                return True
            case b"TAKEN":
                return False
        raise ValueError(f"not an answer to register: {answer!r:.100}")

    def apply(self, seq: int, *, added: list[bytes], removed: list[bytes]) -> Answer:
        keys = self._keys
        arguments = [self._incarnation, seq, joined(added), joined(removed)]
        return Answer(self._run(APPLY, [keys.replica, keys.blocks], arguments))

    def snapshot(self, seq: int, blocks: Iterable[bytes], *, num_blocks: int) -> Answer:
        """Replaces all that was published, in several round trips; readers see the old set until the last."""
        keys, remaining = self._keys, iter(blocks)
        collected = keys.collected(seq)
        while part := list(islice(remaining, _PART_BLOCKS)):
            arguments = [self._incarnation, joined(part), self._ttl_ms]
            answer = Answer(self._run(SNAPSHOT_PART, [keys.replica, collected], arguments))
            if answer is not Answer.OK:
                return answer
        arguments = [self._incarnation, seq, num_blocks]
        return Answer(self._run(SNAPSHOT_SWAP, [keys.replica, keys.blocks, collected], arguments))

    def heartbeat(self, seq: int, state: ReplicaState) -> Answer:
        keys = self._keys
        arguments = [keys.prefix, keys.name, self._incarnation, seq, state.value, self._ttl_ms]
        return Answer(self._run(HEARTBEAT, [keys.members, keys.replica, keys.blocks], arguments))

    def leave(self) -> Answer:
        keys = self._keys
        return Answer(
            self._run(LEAVE, [keys.members, keys.replica, keys.blocks], [keys.name, self._incarnation])
        )

    def _run(self, script: Script, keys: list[str], arguments: list[Any]) -> Any:
        """By digest; a server that was restarted or flushed is given the source again."""
        try:
            return self._client.evalsha(script.sha, len(keys), *keys, *arguments)
        except redis.exceptions.NoScriptError:
            return self._client.eval(script.source, len(keys), *keys, *arguments)
