"""Publishes which blocks this replica has cached, on a thread of its own. Knows no model and no requests.

The device only hands over what changed. This thread keeps a copy of all that should be published, so that
after anything that may have gone wrong on the way (an answer that never came, a gap, a server that lost its
data) one snapshot makes the registry right again, and the device is asked nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter

import redis

from specsplit.core.registry.scripts import Answer, ReplicaState
from specsplit.core.registry.writer import RegistryWriter, connect

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1.0
BATCH_SECONDS = 0.1  # changes are collected this long, to be published together
MAX_PENDING = 20_000  # changes beyond this are published as a snapshot
MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0
_COUNTERS = ("applies", "snapshots", "gaps", "registrations", "superseded", "errors")


class Publisher:
    """`put`, `drain` and `counters` may be called from any thread and never block."""

    def __init__(
        self, url: str, *, namespace: bytes, address: str, incarnation: bytes, ttl_seconds: float
    ) -> None:
        self._client = connect(url, timeout_seconds=TIMEOUT_SECONDS)
        self._writer = RegistryWriter(
            self._client,
            namespace=namespace,
            name=address,
            address=address,
            incarnation=incarnation,
            ttl_seconds=ttl_seconds,
        )
        self._heartbeat_seconds = ttl_seconds / 3
        self._incarnation = incarnation.hex()
        # None only wakes. It holds what changes during one command, or one snapshot: then all is taken out.
        self._inbox: queue.SimpleQueue[dict[bytes, bool] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._state = ReplicaState.SERVING  # set by `drain`
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        # All below belongs to the thread.
        self._blocks: set[bytes] = set()  # what should be published
        self._pending: dict[bytes, bool] = {}  # what of it has not been sent yet, unless a snapshot is due
        self._is_snapshot_due = False
        self._seq = 0
        self._is_registered = False
        self._was_superseded = False
        self._is_connected = False
        self._backoff_seconds = 0.0
        self._next_heartbeat = 0.0
        self._told_state = ReplicaState.SERVING

    def start(self) -> None:
        self._thread.start()

    def put(self, changes: dict[bytes, bool]) -> None:
        """Hashes, and whether each is cached now."""
        self._inbox.put(changes)

    def drain(self) -> None:
        """From now on the registry says that this replica takes no new requests."""
        self._state = ReplicaState.DRAINING
        self._inbox.put(None)

    def stop(self, *, timeout: float) -> None:
        """Leaves the registry, if it can be reached, and ends the thread."""
        self._stop.set()
        self._inbox.put(None)
        self._thread.join(timeout)

    def counters(self) -> dict[str, int]:
        return {
            "registry_connected": int(self._is_connected),
            "registry_registered": int(self._is_registered),
            "registry_published_blocks": len(self._blocks),
            "registry_pending": len(self._pending),
            **{f"registry_{name}": self._counts[name] for name in _COUNTERS},
        }

    # --- on the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self._collect()
            if self._stop.is_set():
                break
            try:
                self._publish()
            except (
                Exception
            ) as error:  # a broken server's answers make the client's parser raise just anything
                self._failed(error)
            else:
                if not self._is_connected:
                    self._is_connected = True
                    log.info("the registry answers")
        self._leave()

    def _collect(self) -> None:
        """Waits for something to do, then takes all changes there are."""
        if self._backoff_seconds:
            self._stop.wait(self._backoff_seconds)
        elif self._is_registered and not self._is_snapshot_due and not self._pending:
            try:
                self._take(self._inbox.get(timeout=max(0.0, self._next_heartbeat - time.monotonic())))
            except queue.Empty:
                return
            self._stop.wait(BATCH_SECONDS)
        elif self._was_superseded:
            self._stop.wait(self._heartbeat_seconds)
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, changes: dict[bytes, bool] | None) -> None:
        for hash_, is_cached in (changes or {}).items():
            if is_cached:
                self._blocks.add(hash_)
            else:
                self._blocks.discard(hash_)
        if changes and not self._is_snapshot_due:
            self._pending.update(changes)
            if len(self._pending) > MAX_PENDING:
                self._snapshot_is_due()

    def _snapshot_is_due(self) -> None:
        self._is_snapshot_due = True
        self._pending = {}

    def _publish(self) -> None:
        if not self._is_registered and not self._register():
            return
        state = self._state
        if time.monotonic() >= self._next_heartbeat or state is not self._told_state:
            self._heard(self._writer.heartbeat(self._seq, state))
            self._told(state)
        if self._is_registered and self._is_snapshot_due:
            self._seq += 1
            self._counts["snapshots"] += 1
            answer = self._writer.snapshot(self._seq, self._blocks, num_blocks=len(self._blocks))
            self._is_snapshot_due = False
            self._heard(answer)
        elif self._is_registered and self._pending:
            self._seq += 1
            self._counts["applies"] += 1
            pending, self._pending = self._pending, {}
            added = [hash_ for hash_, is_cached in pending.items() if is_cached]
            removed = [hash_ for hash_, is_cached in pending.items() if not is_cached]
            self._heard(self._writer.apply(self._seq, added=added, removed=removed))

    def _register(self) -> bool:
        """A process that starts takes the name over; one that had it takes it again only if nobody has."""
        expected = self._writer.holder()
        if self._counts["registrations"] and expected not in ("", self._incarnation):
            self._superseded()
            return False
        state = self._state
        if not self._writer.register(expected=expected, state=state, seq=self._seq):
            self._back_off()  # somebody else was quicker: see who it is next time
            return False
        self._counts["registrations"] += 1
        self._is_registered, self._was_superseded = True, False
        self._told(state)
        self._pending = {}
        self._is_snapshot_due = bool(self._blocks)
        return True

    def _told(self, state: ReplicaState) -> None:
        self._told_state = state
        self._next_heartbeat = time.monotonic() + self._heartbeat_seconds

    def _heard(self, answer: Answer) -> None:
        match answer:
            case Answer.OK:
                self._backoff_seconds = 0.0
            case Answer.UNKNOWN:
                log.warning("the registry has lost this replica; registering again")
                self._is_registered = False
            case Answer.WRONG_INCARNATION:
                self._is_registered = False
                self._superseded()
            case Answer.GAP | Answer.STALE | Answer.DUPLICATE:
                log.warning("the registry does not have what was published (%s)", answer.name)
                self._counts["gaps"] += 1
                self._is_registered = answer is Answer.GAP  # a seq ahead of this one's is nobody's
                self._snapshot_is_due()
                self._back_off()

    def _superseded(self) -> None:
        if not self._was_superseded:
            self._counts["superseded"] += 1
            log.error("another process registered under this replica's address; publishing nothing")
        self._was_superseded = True
        self._backoff_seconds = 0.0  # it looks again at each heartbeat

    def _back_off(self) -> None:
        """The next attempt waits; each failure in a row doubles that."""
        longest = min(MAX_BACKOFF_SECONDS, self._heartbeat_seconds)  # the next heartbeat waits for it, too
        self._backoff_seconds = min(max(2 * self._backoff_seconds, MIN_BACKOFF_SECONDS), longest)

    def _failed(self, error: Exception) -> None:
        """What was sent may have been done or not: a snapshot settles it.

        A server that answers with an error may hold what no replica wrote: registering again replaces that.
        """
        self._counts["errors"] += 1
        if self._is_connected or self._counts["errors"] == 1:  # once, not at each attempt
            log.warning("the registry does not answer: %r", error)
        self._is_connected = False
        if isinstance(error, redis.ResponseError):
            self._is_registered = False
        self._snapshot_is_due()
        self._back_off()

    def _leave(self) -> None:
        try:
            if self._is_registered:
                self._writer.leave()
            self._client.close()
        except Exception as error:
            log.warning("could not leave the registry: %r", error)
