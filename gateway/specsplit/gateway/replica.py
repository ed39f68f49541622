"""The step loop of one verifier replica: open what fits, draft, verify, commit. Knows no other replica.

One task owns the requests placed here; everything else (streams, clients) only changes state between its
awaits and wakes it. A step reads `schedule`, `draft`, `verify`, `commit`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from specsplit.core.errors import NumericError, PromptTooLong, ProtocolError, SpecsplitError, Unavailable
from specsplit.core.types import (
    Capacity,
    NoDraftReason,
    Opened,
    Preempted,
    RequestId,
    RowDone,
    Status,
    Step,
    StepDone,
    StepRow,
    VerifierDescription,
)
from specsplit.gateway.drafting import Drafting, Drafts
from specsplit.gateway.link import gather_forever
from specsplit.gateway.records import Reporter, RowRecord, StepRecord
from specsplit.gateway.routing import Load
from specsplit.gateway.scheduler import PlannedRow, choose_to_open, num_blocks, schedule
from specsplit.gateway.sequence import Phase, Sequence
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.target import Target

WATCH_SECONDS = 1.0
MAX_LOST_VERIFIERS = 3  # times that one request is opened again after its verifier died


class Owner(Protocol):
    """Who places requests here and hears what becomes of them."""

    def accept(self, description: VerifierDescription) -> None:
        """Raises ProtocolError when this verifier may not serve the gateway's requests."""
        ...

    def on_up(self) -> None:
        """The replica takes requests from now on."""
        ...

    def on_returned(self, sequences: list[Sequence]) -> None:
        """These have no replica any more and wait, with all that was committed."""
        ...

    def on_ended(self, sequence: Sequence, outcome: str) -> None:
        """The request is over and nothing of it is held here any more."""
        ...


@dataclass(slots=True)
class _Work:
    """One step on its way: what was planned, what was drafted, what is asked of the verifier, and when."""

    plan: list[PlannedRow]
    started_ns: int
    drafts: Drafts = field(default_factory=Drafts)
    drafted_ns: int | None = None
    step: Step = field(default_factory=lambda: Step(0, ()))
    planned: list[PlannedRow] = field(default_factory=list)  # of the rows of `step`, in its order
    sent_ns: int = 0


class Replica:
    def __init__(
        self,
        address: str,
        settings: GatewaySettings,
        *,
        owner: Owner,
        counters: Counter[str],
        reporter: Reporter,
        tokenizer_digest: str,
    ) -> None:
        self.address = address
        self.counters: Counter[str] = Counter()  # of this replica alone
        self._settings = settings
        self._owner = owner
        self._counters = counters
        self._reporter = reporter
        self._sequences: dict[RequestId, Sequence] = {}
        self._next_step_id = 1
        self._wake = asyncio.Event()
        self._shuffle = random.Random(0) if settings.shuffle_rows else None
        self._target = Target(
            address,
            step_timeout_seconds=settings.step_timeout_seconds,
            counters=counters,
            accept=owner.accept,
            on_up=owner.on_up,
            on_event=self._on_event,
            on_lost=self._on_lost,
        )
        self._drafting: Drafting | None = None
        if settings.drafter is not None:
            self._drafting = Drafting(
                settings.drafter,
                timeout_seconds=settings.draft_timeout_ms / 1000,
                tokenizer_digest=tokenizer_digest,
                counters=counters,
            )

    # --- what the owner sees ------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return self._target.is_ready

    @property
    def can_open(self) -> bool:
        return self._target.is_ready and not self._target.is_draining

    @property
    def is_drafter_up(self) -> bool:
        return self._drafting is not None and self._drafting.link.is_up

    @property
    def drafter_name(self) -> str:
        return "" if self._drafting is None else self._drafting.name

    @property
    def down_since(self) -> float | None:
        """On the monotonic clock; None while it serves, or when it never did."""
        return self._target.down_since

    @property
    def description(self) -> VerifierDescription | None:
        """Of the last verifier accepted at this address."""
        return self._target.last_description

    @property
    def codec_ns(self) -> int:
        return self._target.link.codec_ns + (self._drafting.link.codec_ns if self._drafting else 0)

    @property
    def free_blocks(self) -> int:
        return self._target.free_blocks if self._target.is_ready else 0

    @property
    def num_requests(self) -> int:
        return len(self._sequences)

    def load(self) -> Load:
        block_size = self._target.description.block_size
        return Load(
            queued_tokens=sum(s.num_uncomputed - 1 for s in self._sequences.values()),
            active_blocks=sum(num_blocks(s.num_computed, block_size) for s in self._sequences.values()),
            num_requests=len(self._sequences),
        )

    def place(self, sequence: Sequence) -> None:
        """Takes a waiting request; it is opened as soon as it fits."""
        assert sequence.phase is Phase.WAITING, sequence.phase
        self._sequences[sequence.request.request_id] = sequence
        sequence.replicas.append(self.address)
        self._wake.set()

    def release(self, sequence: Sequence) -> None:
        """Frees what the request holds here, at the verifier and at the drafter."""
        del self._sequences[sequence.request.request_id]
        if sequence.is_at_verifier:
            self._target.close(sequence.close())
        if self._drafting is not None:
            self._drafting.close(sequence)
        self._wake.set()

    # --- the step -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until cancelled; a broken invariant raises."""
        runners = [self._target.link.run, self._run_steps, self._watch]
        if self._drafting is not None:
            runners.append(self._drafting.link.run)
        await gather_forever(*runners)

    async def _run_steps(self) -> None:
        while True:
            self._wake.clear()
            work = self._schedule()
            if not work.plan:
                self._reporter.flush_soon()
                await self._wake.wait()
                continue
            await self._draft(work)
            self._compose(work)
            if not work.step.rows:  # all of them were cancelled or preempted meanwhile
                continue
            done = await self._verify(work)
            if done is None:
                continue
            try:
                self._commit(work, done)
            except ProtocolError as error:
                self._target.violated(str(error))
                self._target.link.drop(str(error))

    def _schedule(self) -> _Work:
        """Opens the waiting requests that fit, and plans the rows of those that run."""
        start = time.perf_counter_ns()
        work = _Work([], started_ns=time.time_ns())
        if self._target.link.is_up:
            verifier = self._target.description
            if not self._target.is_draining:
                for sequence in choose_to_open(
                    self._sequences.values(), verifier, free_blocks=self._target.free_blocks
                ):
                    self._target.open(sequence.open())
            work.plan = schedule(
                self._sequences.values(), verifier, max_prefill_tokens=self._settings.max_prefill_tokens
            )
        self._counters["own_ns"] += time.perf_counter_ns() - start
        return work

    async def _draft(self, work: _Work) -> None:
        is_asked = self.is_drafter_up and any(row.max_draft for row in work.plan)
        if self._drafting is None or not is_asked:
            return
        work.drafts = await self._drafting.draft(work.plan, self._target.description.vocab_size)
        work.drafted_ns = time.time_ns()

    def _compose(self, work: _Work) -> None:
        """The step of the planned rows that still run."""
        start = time.perf_counter_ns()
        work.planned = [row for row in work.plan if self._runs_here(row)]
        if self._shuffle is not None:
            self._shuffle.shuffle(work.planned)
        rows = []
        for row in work.planned:
            sequence = row.sequence
            rows.append(
                StepRow(
                    request_id=sequence.request.request_id,
                    generation=sequence.generation,
                    base_len=len(sequence.token_ids),
                    digest=sequence.digest,
                    num_computed=sequence.num_computed,
                    num_tokens=row.num_tokens,
                    draft_ids=work.drafts.ids.get(sequence.request.request_id, ()),
                )
            )
        work.step = Step(self._next_step_id, tuple(rows))
        self._next_step_id += 1
        self._counters["own_ns"] += time.perf_counter_ns() - start

    def _runs_here(self, row: PlannedRow) -> bool:
        """Still as planned: since then it may have ended, lost its blocks, or gone on elsewhere."""
        sequence = row.sequence
        return self._sequences.get(sequence.request.request_id) is sequence and sequence.is_running(
            row.generation
        )

    async def _verify(self, work: _Work) -> StepDone | None:
        work.sent_ns = time.time_ns()
        self._reporter.flush_soon()  # about the step before, while the verifier works
        return await self._target.verify(work.step)

    def _commit(self, work: _Work, done: StepDone) -> None:
        start, answered_ns = time.perf_counter_ns(), time.time_ns()
        step = work.step
        verdicts = _checked_verdicts(step, done)  # all of them first: a step counts as a whole or not at all
        records: list[RowRecord] = []
        ended: list[Sequence] = []
        for sent, row, verdict in zip(step.rows, work.planned, verdicts, strict=True):
            if not row.sequence.is_running(sent.generation):
                continue  # cancelled or preempted while the step ran; the verdict is void
            if verdict.status is not Status.OK:
                self._refused_row(row.sequence, sent, verdict)
                continue
            records.append(self._commit_row(work, row, sent, verdict, answered_ns))
            if row.sequence.is_finished:
                ended.append(row.sequence)
        self._counters["steps"] += 1
        self._counters["step_rows"] += len(step.rows)
        self._counters["verifier_idle_us"] += done.idle_us
        self._counters["verifier_forward_us"] += done.forward_us
        self._counters["verifier_sample_us"] += done.sample_us
        self._reporter.stepped(self._step_record(work, done, records, answered_ns))
        for sequence in ended:
            self._end(sequence, sequence.finish_reason.openai)
        self._counters["own_ns"] += time.perf_counter_ns() - start

    def _commit_row(
        self, work: _Work, row: PlannedRow, sent: StepRow, verdict: RowDone, at_ns: int
    ) -> RowRecord:
        is_prefill = sent.num_tokens > 1
        reason = self._no_draft_reason(row, work.drafts) if sent.is_sampling and not sent.draft_ids else None
        counted = row.sequence.commit(
            verdict,
            num_drafts=len(sent.draft_ids),
            no_draft_reason=reason,
            is_prefill=is_prefill,
            at_ns=at_ns,
        )
        return RowRecord(
            request=row.sequence.request,
            base_len=sent.base_len,
            num_tokens=sent.num_tokens,
            is_sampling=sent.is_sampling,
            granted=0 if self._drafting is None else min(row.max_draft, self._drafting.max_draft),
            drafted=counted.drafted,
            accepted=counted.accepted,
            committed=counted.committed,
            no_draft_reason=None if is_prefill else reason,
        )

    def _no_draft_reason(self, row: PlannedRow, drafts: Drafts) -> NoDraftReason:
        request = row.sequence.request
        if self._drafting is None or request.k == 0:
            return NoDraftReason.OFF
        if row.max_draft == 0:
            return NoDraftReason.NO_ROOM
        is_empty = request.request_id in drafts.without_match
        return NoDraftReason.NO_MATCH if is_empty else NoDraftReason.DRAFTER_AWAY

    def _refused_row(self, sequence: Sequence, sent: StepRow, verdict: RowDone) -> None:
        match verdict.status:
            case Status.PREEMPTED | Status.UNKNOWN_REQUEST:
                self._preempted(sequence)
            case Status.NUMERIC_ERROR:
                self._fail(sequence, NumericError(f"the model's output was not finite: {verdict.detail}"))
            case Status.INTERNAL:
                self._fail(sequence, SpecsplitError(f"the verifier failed: {verdict.detail}"))
            case _:
                self._target.violated(f"row {sent} was refused: {verdict.status.name} {verdict.detail}")
                self._fail(sequence, ProtocolError(f"the verifier refused a row: {verdict.status.name}"))

    def _step_record(
        self, work: _Work, done: StepDone, rows: Iterable[RowRecord], answered_ns: int
    ) -> StepRecord:
        return StepRecord(
            step_id=work.step.step_id,
            replica=self.address,
            drafter=self.drafter_name,
            started_ns=work.started_ns,
            drafted_ns=work.drafted_ns,
            sent_ns=work.sent_ns,
            answered_ns=answered_ns,
            committed_ns=time.time_ns(),
            draft_us=work.drafts.draft_us,
            draft_traceparent=work.drafts.traceparent,
            done=done,
            rows=tuple(rows),
        )

    # --- what the verifier says ---------------------------------------------------------------------------

    def _on_event(self, event: Capacity | Opened | Preempted) -> None:
        if isinstance(event, Opened):
            self._on_opened(event)
        elif isinstance(event, Preempted):
            sequence = self._sequences.get(event.request_id)
            if sequence is not None and sequence.is_open(event.generation):
                self._preempted(sequence)
        self._wake.set()

    def _on_opened(self, event: Opened) -> None:
        sequence = self._sequences.get(event.request_id)
        if sequence is None or sequence.generation != event.generation:
            return  # cancelled meanwhile; its Close is on the way
        if sequence.phase is not Phase.OPENING:
            return  # preempted before this answer was read
        match event.status:
            case Status.OK:
                is_first = sequence.opened_ns is None
                sequence.opened(event.cached_tokens, at_ns=time.time_ns())
                if is_first:
                    self.counters["prompt_tokens"] += sequence.num_prompt
                    self.counters["cached_tokens"] += sequence.usage().cached_tokens
                    self.counters["predicted_cached_tokens"] += sequence.predicted_cached_tokens or 0
            case Status.DRAINING:
                self._target.is_draining = True
                sequence.evicted()
                self._return([s for s in self._sequences.values() if s.phase is Phase.WAITING])
            case Status.TOO_LONG:
                self._fail(sequence, PromptTooLong(event.detail, field="prompt"))
            case _:
                self._target.violated(f"open of {event.request_id.hex()}: {event.status.name} {event.detail}")
                self._fail(sequence, ProtocolError(f"the verifier refused it: {event.status.name}"))

    def _on_lost(self) -> None:
        """All requests that were here go on elsewhere or wait for this verifier's successor.

        But for one that has lost verifier after verifier: it may be what kills them.
        """
        for sequence in list(self._sequences.values()):
            if not sequence.is_at_verifier:
                continue
            sequence.num_lost += 1
            sequence.evicted()
            if sequence.num_lost > MAX_LOST_VERIFIERS:
                self._fail(sequence, Unavailable(f"the verifier was lost {sequence.num_lost} times"))
        self._return(list(self._sequences.values()))

    def _preempted(self, sequence: Sequence) -> None:
        """It stays here, where what is left of its blocks is, unless nothing is opened here any more."""
        self._counters["preempted"] += 1
        sequence.num_preempted += 1
        sequence.evicted()
        if self._target.is_draining:
            self._return([sequence])

    def _return(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.release(sequence)
        self._owner.on_returned(sequences)

    async def _watch(self) -> None:
        """Gives up a verifier that does not answer an Open; the answer to a step has its own time-out."""
        opening: dict[tuple[RequestId, int], float] = {}  # since when each was seen to wait for its Opened
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            opening = {
                key: opening.get(key, now)
                for sequence in self._sequences.values()
                if sequence.phase is Phase.OPENING
                for key in ((sequence.request.request_id, sequence.generation),)
            }
            if any(now - since > self._settings.step_timeout_seconds for since in opening.values()):
                self._counters["open_timeouts"] += 1
                self._target.link.drop("no answer to an Open")

    # --- the end of a request -----------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: SpecsplitError) -> None:
        sequence.fail(error)
        self._end(sequence, error.code)

    def _end(self, sequence: Sequence, outcome: str) -> None:
        self.release(sequence)
        self._owner.on_ended(sequence, outcome)


def _checked_verdicts(step: Step, done: StepDone) -> list[RowDone]:
    """The verdicts in the order of the step's rows; raises ProtocolError if a row has no possible one."""
    if len(done.rows) != len(step.rows):
        raise ProtocolError(f"step {step.step_id}: {len(done.rows)} rows for {len(step.rows)}")
    by_row = {(row.request_id, row.generation, row.base_len): row for row in done.rows}
    verdicts = []
    for sent in step.rows:
        verdict = by_row.get((sent.request_id, sent.generation, sent.base_len))
        if verdict is None:
            raise ProtocolError(f"step {step.step_id}: no verdict on {sent.request_id.hex()}")
        if verdict.status is Status.OK and not _is_possible(sent, verdict):
            raise ProtocolError(f"step {step.step_id}: {verdict} cannot be the verdict on {sent}")
        verdicts.append(verdict)
    return verdicts


def _is_possible(sent: StepRow, verdict: RowDone) -> bool:
    """Whether an OK verdict can be one on `sent`: a chunk commits nothing, a sampling row one id at least."""
    num_committed = len(verdict.committed_ids)
    if not sent.is_sampling:
        return num_committed == 0 and verdict.num_computed == sent.num_computed + sent.num_tokens
    return (
        1 <= num_committed <= len(sent.draft_ids) + 1
        and verdict.num_accepted <= min(num_committed, len(sent.draft_ids))
        and verdict.num_computed == sent.base_len + num_committed - 1
    )
