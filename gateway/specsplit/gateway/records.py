"""What happened to requests and in steps, as plain facts for those who watch: traces, metrics.

The loop hands each record over once, after the fact; nobody who watches can change or delay a step. Times are
nanoseconds since the Unix epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specsplit.core.types import NoDraftReason, StepDone, TokenIds, Usage
from specsplit.gateway.request import AdmittedRequest

FINISHED = ("stop", "length")
"""Outcomes of requests that ended by themselves."""
_FLUSH_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One row of a step whose verdict counted. Sums over a request's rows equal its usage."""

    request: AdmittedRequest
    base_len: int
    num_tokens: int
    """Committed tokens computed: the length of a prefill chunk, 1 when decoding."""
    is_sampling: bool
    """Whether the row ended in a sampled token; one that did not is a prefill chunk."""
    granted: int
    """Longest draft that the gateway allowed."""
    drafted: int
    accepted: int
    committed: int
    """Tokens that the client was given."""
    no_draft_reason: NoDraftReason | None
    """Why nothing was drafted, on a row that samples."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one verifier replica and its rows, in the step's order."""

    step_id: int
    replica: str
    """Address of the verifier."""
    drafter: str
    """Name of the drafter; empty without one."""
    started_ns: int
    """Scheduling began."""
    drafted_ns: int | None
    """The wait for drafts, which began with the end of scheduling, was over; None when nothing was asked."""
    sent_ns: int
    answered_ns: int
    committed_ns: int
    draft_us: int | None
    """The drafter's own time; None when it did not answer in time or was not asked."""
    draft_traceparent: str
    """Context of the drafter's span of its batch; empty when there is none."""
    done: StepDone
    """The verifier's times, sizes and the context of its span of the batch."""
    rows: tuple[RowRecord, ...]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The whole life of one request; handed over when it has ended."""

    request: AdmittedRequest
    outcome: str
    """`stop`, `length`, `cancelled`, or the code of the error that it ended with."""
    usage: Usage
    output_ids: TokenIds
    admitted_ns: int
    opened_ns: int | None
    """A verifier took it first; None when none ever did."""
    first_token_ns: int | None
    ended_ns: int
    replicas: tuple[str, ...]
    """Addresses of the verifiers that had it, in order; more than one after a failover."""
    drafter: str
    num_opens: int
    num_preempted: int
    predicted_cached_tokens: int | None
    """What routing expected to be cached where the request was sent; None when there was no choice."""


class Observer(Protocol):
    """Hears of each event once; must neither block nor raise."""

    def admitted(self, request: AdmittedRequest, *, at_ns: int) -> None: ...
    def stepped(self, step: StepRecord) -> None: ...
    def ended(self, record: RequestRecord) -> None: ...


class Reporter:
    """Hands records to the observers in their order, a moment after somebody said that it is a good one.

    Making the spans of many rows takes milliseconds: a good moment is when a step was sent, or when there is
    none to send. With several replicas one's good moment may still be another's bad one.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._records: list[StepRecord | RequestRecord] = []
        self._flushing: asyncio.TimerHandle | None = None

    def admitted(self, request: AdmittedRequest, *, at_ns: int) -> None:
        for observer in self._observers:
            observer.admitted(request, at_ns=at_ns)

    def stepped(self, record: StepRecord) -> None:
        self._records.append(record)

    def ended(self, record: RequestRecord) -> None:
        self._records.append(record)

    def flush_soon(self) -> None:
        """To be called when the next step is on its way: what was just sent leaves first."""
        if self._records and self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        records, self._records = self._records, []
        for record in records:
            for observer in self._observers:
                if isinstance(record, StepRecord):
                    observer.stepped(record)
                else:
                    observer.ended(record)
