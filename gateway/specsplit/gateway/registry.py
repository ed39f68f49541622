"""Asks the registry which replica holds a prefix, and gives up quickly. Knows no routing.

A registry that is dead, slow or broken costs a request one short time-out, then nothing: after a few failures
in a row nobody asks for a while, but for one who tries.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from specsplit.core.registry.scripts import LOOKUP, members_key, namespace_prefix, parse_lookup

MAX_FAILURES = 3  # in a row, before the circuit opens
MIN_OPEN_SECONDS = 1.0
MAX_OPEN_SECONDS = 10.0
_NUM_CONNECTIONS = (
    2  # connecting takes 2 ms of the loop's time: a burst of lookups must not connect anew each
)
_MAX_ASKING = 16  # lookups at once: about a millisecond each on those connections, with other work beside

_Connection = redis.asyncio.connection.AbstractConnection


@dataclass(slots=True)
class _Question:
    namespace: bytes
    hashes: bytes
    is_asked: bool = False  # a connection was free for it


class RegistryReader:
    """`counters` are added to: registry_lookups, _timeouts, _errors, _skipped, and microseconds in all."""

    def __init__(self, url: str, *, timeout_seconds: float, counters: Counter[str]) -> None:
        """Connects when first asked."""
        self._timeout_seconds = timeout_seconds
        self._counters = counters
        for name in ("lookups", "lookup_timeouts", "lookup_errors", "lookup_skipped", "lookup_us"):
            counters[f"registry_{name}"] = 0
        self._pool = redis.asyncio.ConnectionPool.from_url(
            url,
            protocol=2,  # half of the time of 3 for so short an answer
            socket_connect_timeout=timeout_seconds,
            socket_timeout=None,  # else it sends by `wait_for`, which loses a cancellation in Python 3.11
            retry=Retry(NoBackoff(), 0),
            driver_info=None,  # saves telling it at connecting
        )
        self._idle: list[_Connection] = []
        self._free = asyncio.Semaphore(_NUM_CONNECTIONS)
        self._num_asking = 0
        self._breaker = _Breaker()

    @property
    def is_open(self) -> bool:
        """Whether nobody asks at the moment, because nobody was answered."""
        return not self._breaker.may_ask(time.monotonic())

    async def lookup(self, namespace: bytes, hashes: Sequence[bytes]) -> dict[bytes, int] | None:
        """How many of the leading blocks `hashes` each incarnation holds; None without an answer in time."""
        now = time.monotonic()
        if not self._breaker.may_ask(now) or self._num_asking >= _MAX_ASKING:
            self._counters["registry_lookup_skipped"] += 1
            return None
        era = self._breaker.asks(now)
        start = time.perf_counter_ns()
        self._num_asking += 1
        question = _Question(namespace, b"".join(hashes))
        asking = asyncio.ensure_future(self._ask(question))
        try:
            # Unlike a time-out that cancels, this takes an answer that came while the loop was held up.
            await asyncio.wait((asking,), timeout=self._timeout_seconds)
            if not asking.done():
                self._counters["registry_lookup_timeouts"] += 1
                if question.is_asked:  # else it only waited for others
                    self._breaker.failed(time.monotonic(), era)
                return None
            found = parse_lookup(asking.result())
        except Exception:  # a broken server's answers make the client's parser raise just anything
            self._counters["registry_lookup_errors"] += 1
            self._breaker.failed(time.monotonic(), era)
            await self._drop_idle()  # the server may be another one now
            return None
        finally:
            self._num_asking -= 1
            asking.cancel()
            self._counters["registry_lookup_us"] += (time.perf_counter_ns() - start) // 1000
        self._counters["registry_lookups"] += 1
        self._breaker.answered()
        return found

    async def close(self) -> None:
        await self._drop_idle()

    async def _ask(self, question: _Question) -> Any:
        """On a connection kept only if the whole answer was read: no late one meets the next question."""
        async with self._free:
            question.is_asked = True
            return await self._ask_on(self._idle.pop() if self._idle else self._new_connection(), question)

    async def _ask_on(self, connection: _Connection, question: _Question) -> Any:
        is_done = False
        try:
            if not connection.is_connected:
                await connection.connect()  # type: ignore[no-untyped-call]
            namespace = question.namespace
            arguments = (1, members_key(namespace), namespace_prefix(namespace), question.hashes)
            try:
                answer = await _command(connection, "EVALSHA", LOOKUP.sha, *arguments)
            except redis.exceptions.NoScriptError:
                answer = await _command(connection, "EVAL", LOOKUP.source, *arguments)
            is_done = True
            return answer
        finally:
            if is_done:
                self._idle.append(connection)
            else:
                await connection.disconnect(nowait=True)

    def _new_connection(self) -> _Connection:
        connection: _Connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        return connection

    async def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)


class _Breaker:
    """Closed until MAX_FAILURES in a row; then open for a time that doubles, with one try in between."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._open_seconds = MIN_OPEN_SECONDS
        self._open_until = 0.0
        self._era = 0  # ends when the circuit opens: questions of before say nothing new by failing

    def may_ask(self, now: float) -> bool:
        return self._num_failures < MAX_FAILURES or now >= self._open_until

    def asks(self, now: float) -> int:
        """Returns the era, to be named with a failure. While open, who asks keeps the others waiting."""
        if self._num_failures >= MAX_FAILURES:
            self._open_until = now + self._open_seconds
        return self._era

    def answered(self) -> None:
        self._num_failures = 0
        self._open_seconds = MIN_OPEN_SECONDS

    def failed(self, now: float, era: int) -> None:
        if era != self._era:
            return
        self._num_failures += 1
        if self._num_failures < MAX_FAILURES:
            return
        if self._num_failures > MAX_FAILURES:
            self._open_seconds = min(2 * self._open_seconds, MAX_OPEN_SECONDS)
        self._open_until = now + self._open_seconds
        self._era += 1


async def _command(connection: _Connection, *arguments: Any) -> Any:
    await connection.send_command(*arguments)
    return await connection.read_response()
