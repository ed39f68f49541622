"""The one thread that owns the core and its model: commands come in, events go out. Knows no gRPC.

A turn opens and closes what waits, runs one merged step, and hands over all its events with the counters.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from specsplit.core.errors import SpecsplitError
from specsplit.core.types import (
    Capacity,
    CloseRequest,
    OpenRequest,
    Step,
    StepDone,
    VerifierDescription,
    VerifierEvent,
)
from specsplit.verifier.core import VerifierCore
from specsplit.verifier.mailbox import EndOfCommands, Mailbox, Waiting
from specsplit.verifier.sequence import Owner
from specsplit.verifier.tracing import TracedBatch

log = logging.getLogger(__name__)

_MAX_U32 = 2**32 - 1
_ALWAYS_REPORTED = ("steps", "batches", "preemptions", "replays", "step_failures", "invariant_violations")


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """All that the stream sent is answered."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the loader hands to the device thread."""

    core: VerifierCore
    description: VerifierDescription


@dataclass(frozen=True, slots=True)
class Failed:
    """The thread has ended: nothing will run any more."""

    error: Exception


@dataclass(frozen=True, slots=True)
class TurnDone:
    """Events by stream, in order; the counters after them; hashes that are cached now (or no longer).

    `traced` is the batch whose steps are among the events, if a sampled request was in it.
    """

    events: list[tuple[Owner, VerifierEvent | StreamEnded]]
    counters: dict[str, int]
    block_changes: dict[bytes, bool]
    traced: TracedBatch | None


Outcome: TypeAlias = Loaded | TurnDone | Failed


@dataclass(frozen=True, slots=True)
class _Connect:
    owner: Owner


@dataclass(frozen=True, slots=True)
class _Disconnect:
    owner: Owner


@dataclass(frozen=True, slots=True)
class _Command:
    owner: Owner
    waiting: Waiting


@dataclass(frozen=True, slots=True)
class _Drain:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message: TypeAlias = _Connect | _Disconnect | _Command | _Drain | _Stop


class Device:
    """`load` runs on the thread first; `on_outcome` is called there, once per turn, and must not block."""

    def __init__(
        self,
        load: Callable[[], Loaded],
        on_outcome: Callable[[Outcome], None],
        *,
        max_steps_in_flight: int,
    ) -> None:
        self._load = load
        self._on_outcome = on_outcome
        self._max_steps_in_flight = max_steps_in_flight
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def connect(self, owner: Owner) -> None:
        """Its first event is its Capacity."""
        self._inbox.put(_Connect(owner))

    def disconnect(self, owner: Owner) -> None:
        """Closes all requests of the stream, whatever it still waits for."""
        self._inbox.put(_Disconnect(owner))

    def submit(self, owner: Owner, command: OpenRequest | CloseRequest | Step | EndOfCommands) -> None:
        self._inbox.put(_Command(owner, Waiting(command, time.perf_counter())))

    def drain(self) -> None:
        """From now on nothing is opened."""
        self._inbox.put(_Drain())

    def stop(self, *, timeout: float) -> None:
        """Ends the thread after its turn; one that is still loading dies with the process."""
        self._inbox.put(_Stop())
        self._thread.join(timeout)

    # --- on the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            loaded = self._load()
            self._on_outcome(loaded)
            _Turns(loaded.core, self._inbox, self._on_outcome, self._max_steps_in_flight).run()
        except Exception as error:  # a bug or a model that does not load: the service ends, loudly
            if not isinstance(error, SpecsplitError):  # those say all there is to say
                log.exception("the device thread failed")
            self._on_outcome(Failed(error))


class _Turns:
    """The loop of the thread and what it remembers between turns."""

    def __init__(
        self,
        core: VerifierCore,
        inbox: queue.SimpleQueue[_Message],
        on_outcome: Callable[[Outcome], None],
        max_steps_in_flight: int,
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._on_outcome = on_outcome
        self._max_steps_in_flight = max_steps_in_flight
        self._mailbox = Mailbox(
            max_step_tokens=core.limits.max_step_tokens, max_step_rows=core.limits.max_step_rows
        )
        self._told_free: dict[Owner, int] = {}  # what each stream last heard of free blocks
        self._events: list[tuple[Owner, VerifierEvent | StreamEnded]] = []
        self._traced: TracedBatch | None = None
        self._idle_since: float | None = None  # None while no request is open: that is no gap
        self._is_stopping = False

    def run(self) -> None:
        while True:
            self._receive()
            if self._is_stopping:
                return
            for owner, command in self._mailbox.take_until_steps():
                self._open_or_close(owner, command)
            if self._events:  # answers do not wait for the step
                self._hand_over()
            self._step()
            for owner in self._mailbox.owners:
                if self._told_free[owner] != self._core.pool.num_free:
                    self._tell_capacity(owner)
            self._hand_over()

    def _receive(self) -> None:
        """Waits for a message unless steps wait, then takes all there are."""
        if self._mailbox.is_empty:
            self._take(self._inbox.get())
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, message: _Message) -> None:
        match message:
            case _Command():
                if message.owner in self._mailbox:  # else its stream has ended
                    self._mailbox.put(message.owner, message.waiting)
            case _Connect():
                self._mailbox.add_stream(message.owner)
                self._tell_capacity(message.owner)
            case _Disconnect():
                self._end(message.owner)
            case _Drain():
                self._core.is_draining = True
            case _Stop():
                self._is_stopping = True

    def _end(self, owner: Owner) -> None:
        if owner in self._mailbox:
            self._mailbox.remove_stream(owner)
            self._told_free.pop(owner, None)
            self._core.close_owner(owner)

    def _open_or_close(self, owner: Owner, command: OpenRequest | CloseRequest | EndOfCommands) -> None:
        match command:
            case OpenRequest():
                if not self._core.sequences:
                    self._idle_since = time.perf_counter()
                self._tell(owner, self._core.open(owner, command))
            case CloseRequest():
                self._core.close(owner, command)
            case EndOfCommands():
                self._end(owner)
                self._events.append((owner, StreamEnded()))

    def _step(self) -> None:
        taken = self._mailbox.take_steps()
        if not taken:
            return
        started, started_ns = time.perf_counter(), time.time_ns()
        done = self._core.step([(owner, step) for owner, step, _ in taken])
        if done.traces:
            self._traced = TracedBatch(done.traces, started_ns, time.time_ns())
        for owner, preempted in done.preempted:
            self._tell(owner, preempted)
        idle = 0.0 if self._idle_since is None else started - self._idle_since
        for (owner, step, received_at), rows in zip(taken, done.steps, strict=True):
            step_done = StepDone(
                step_id=step.step_id,
                rows=rows,
                queue_us=_microseconds(started - received_at),
                forward_us=done.forward_us,
                sample_us=done.sample_us,
                idle_us=_microseconds(idle),
                batch_tokens=done.num_tokens,
                batch_rows=done.num_rows,
                free_blocks=self._core.pool.num_free,
            )
            self._tell(owner, step_done)
        self._idle_since = time.perf_counter() if self._core.sequences else None

    def _tell(self, owner: Owner, event: VerifierEvent) -> None:
        self._events.append((owner, event))
        self._told_free[owner] = event.free_blocks

    def _tell_capacity(self, owner: Owner) -> None:
        self._tell(owner, Capacity(self._max_steps_in_flight, self._core.pool.num_free))

    def _hand_over(self) -> None:
        core = self._core
        counters = {
            "is_draining": int(core.is_draining),
            "open_requests": len(core.sequences),
            "streams": len(self._mailbox.owners),
            "total_blocks": core.pool.num_blocks,
            "free_blocks": core.pool.num_free,
            "cached_blocks": len(core.pool.cached_hashes),
            **dict.fromkeys(_ALWAYS_REPORTED, 0),
            **core.counts,
        }
        self._on_outcome(TurnDone(self._events, counters, core.pool.take_changes(), self._traced))
        self._events, self._traced = [], None


def _microseconds(seconds: float) -> int:
    """As the wire's 32 bits: a request may stand open for longer than the 71 minutes that they hold."""
    return min(int(seconds * 1e6), _MAX_U32)
