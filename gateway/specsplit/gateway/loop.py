"""The step loop: open what fits, draft, verify, commit, for one verifier. Knows no client API and no text.

One task owns all requests; everything else (streams, clients) only changes state between its awaits and wakes
it. A step reads `schedule`, `draft`, `verify`, `commit`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping

from specsplit.core.errors import (
    NumericError,
    Overloaded,
    PromptTooLong,
    ProtocolError,
    SpecsplitError,
    Unavailable,
)
from specsplit.core.types import (
    Capacity,
    Finished,
    GenerateEvent,
    ModelCard,
    Opened,
    Preempted,
    RequestId,
    RowDone,
    Started,
    Status,
    Step,
    StepDone,
    StepRow,
    TokenIds,
)
from specsplit.gateway.drafting import Drafting
from specsplit.gateway.link import gather_forever
from specsplit.gateway.request import AdmittedRequest, Limits
from specsplit.gateway.scheduler import PlannedRow, choose_to_open, schedule
from specsplit.gateway.sequence import Phase, Sequence
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.target import Target
from specsplit.gateway.text.tokenizer import Tokenizer

WATCH_SECONDS = 1.0
MAX_LOST_VERIFIERS = 3  # times that one request is opened again after its verifier died
COUNTERS = (  # those that are shown also while they are 0
    "requests_admitted",
    "requests_cancelled",
    "steps",
    "step_rows",
    "step_timeouts",
    "open_timeouts",
    "preempted",
    "verifier_lost",
    "draft_timeouts",
    "draft_skipped_steps",
    "draft_refused",
    "invariant_violations",
)


class GatewayLoop:
    """The `Generator` of the APIs. `run` must be running for requests to progress."""

    def __init__(self, settings: GatewaySettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._sequences: dict[RequestId, Sequence] = {}
        self._next_step_id = 1
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()  # set each time the last request leaves
        self._is_draining = False
        self._shuffle = random.Random(0) if settings.shuffle_rows else None
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._target = Target(
            settings.verifier,
            tokenizer_digest=tokenizer.digest,
            step_timeout_seconds=settings.step_timeout_seconds,
            counters=self._counters,
            on_event=self._on_event,
            on_lost=self._on_lost,
        )
        self._drafting: Drafting | None = None
        if settings.drafter is not None:
            self._drafting = Drafting(
                settings.drafter,
                timeout_seconds=settings.draft_timeout_ms / 1000,
                tokenizer_digest=tokenizer.digest,
                counters=self._counters,
            )

    # --- what the APIs see --------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._target.is_ready and not self._is_draining

    def model(self) -> ModelCard:
        description = self._target.description
        return ModelCard(self._settings.model_name or description.model, description.max_sequence_tokens)

    def limits(self) -> Limits:
        description = self._target.description
        return Limits(description.vocab_size, description.max_sequence_tokens)

    def counters(self) -> Mapping[str, int]:
        phases = Counter(sequence.phase for sequence in self._sequences.values())
        codec_ns = self._target.link.codec_ns + (self._drafting.link.codec_ns if self._drafting else 0)
        return {
            "requests": len(self._sequences),
            **{f"requests_{phase.value}": phases[phase] for phase in Phase},
            "verifier_up": int(self._target.link.is_up),
            "drafter_up": int(self._drafting is not None and self._drafting.link.is_up),
            "free_blocks": self._target.free_blocks,
            "codec_us": codec_ns // 1000,
            **self._counters,
        }

    async def generate(self, request: AdmittedRequest) -> AsyncGenerator[GenerateEvent, None]:
        if self._is_draining:
            raise Unavailable("the gateway is shutting down")
        if len(self._sequences) >= self._settings.max_requests:
            raise Overloaded(f"{len(self._sequences)} requests are admitted already")
        assert request.request_id not in self._sequences
        sequence = Sequence(request, self._tokenizer)
        self._sequences[request.request_id] = sequence
        self._empty.clear()
        self._counters["requests_admitted"] += 1
        self._wake.set()
        try:
            yield Started(request.request_id, request.prompt_ids, request.sampling.seed)
            while True:
                event = await sequence.events.get()
                if isinstance(event, SpecsplitError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            if sequence.phase is not Phase.FINISHED:
                self._counters["requests_cancelled"] += 1
                self._forget(sequence)

    async def drain(self) -> None:
        """Refuses new requests and returns when none is left."""
        self._is_draining = True
        if self._sequences:
            await self._empty.wait()

    # --- the step -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until cancelled; a broken invariant raises."""
        runners = [self._target.link.run, self._run_steps, self._watch]
        if self._drafting is not None:
            runners.append(self._drafting.link.run)
        await gather_forever(*runners)

    async def _run_steps(self) -> None:
        while True:
            start = time.perf_counter_ns()
            self._wake.clear()
            plan = self._schedule()
            self._counters["own_ns"] += time.perf_counter_ns() - start
            if not plan:
                await self._wake.wait()
                continue
            drafts = await self._draft(plan)
            step, planned = self._compose(plan, drafts)
            if not step.rows:  # all of them were cancelled or preempted meanwhile
                continue
            done = await self._target.verify(step)
            if done is None:
                continue
            try:
                self._commit(step, planned, done)
            except ProtocolError as error:
                self._target.violated(str(error))
                self._target.link.drop(str(error))

    def _schedule(self) -> list[PlannedRow]:
        """Opens the waiting requests that fit, and plans the rows of those that run."""
        if not self._target.link.is_up:
            return []
        verifier = self._target.description
        if not self._target.is_draining:
            for sequence in choose_to_open(
                self._sequences.values(), verifier, free_blocks=self._target.free_blocks
            ):
                self._target.open(sequence.open())
        return schedule(
            self._sequences.values(), verifier, max_prefill_tokens=self._settings.max_prefill_tokens
        )

    async def _draft(self, plan: list[PlannedRow]) -> dict[RequestId, TokenIds]:
        if self._drafting is None:
            return {}
        return await self._drafting.draft(plan, self._target.description.vocab_size)

    def _compose(
        self, plan: list[PlannedRow], drafts: Mapping[RequestId, TokenIds]
    ) -> tuple[Step, list[PlannedRow]]:
        """The step of the planned rows that still run, and those rows, in the order of the step."""
        start = time.perf_counter_ns()
        planned = [row for row in plan if row.sequence.phase is Phase.RUNNING]
        if self._shuffle is not None:
            self._shuffle.shuffle(planned)
        rows = []
        for row in planned:
            sequence = row.sequence
            rows.append(
                StepRow(
                    request_id=sequence.request.request_id,
                    generation=sequence.generation,
                    base_len=len(sequence.token_ids),
                    digest=sequence.digest,
                    num_computed=sequence.num_computed,
                    num_tokens=row.num_tokens,
                    draft_ids=drafts.get(sequence.request.request_id, ()),
                )
            )
        step = Step(self._next_step_id, tuple(rows))
        self._next_step_id += 1
        self._counters["own_ns"] += time.perf_counter_ns() - start
        return step, planned

    def _commit(self, step: Step, planned: list[PlannedRow], done: StepDone) -> None:
        start = time.perf_counter_ns()
        if len(done.rows) != len(step.rows):
            raise ProtocolError(f"step {step.step_id}: {len(done.rows)} rows for {len(step.rows)}")
        verdicts = {(row.request_id, row.generation, row.base_len): row for row in done.rows}
        for sent, row in zip(step.rows, planned, strict=True):
            verdict = verdicts.get((sent.request_id, sent.generation, sent.base_len))
            if verdict is None:
                raise ProtocolError(f"step {step.step_id}: no verdict on {sent.request_id.hex()}")
            if verdict.status is Status.OK and not _is_possible(sent, verdict):
                raise ProtocolError(f"step {step.step_id}: {verdict} cannot be the verdict on {sent}")
            self._commit_row(row.sequence, sent, verdict)
        self._counters["steps"] += 1
        self._counters["step_rows"] += len(step.rows)
        self._counters["verifier_idle_us"] += done.idle_us
        self._counters["verifier_forward_us"] += done.forward_us
        self._counters["verifier_sample_us"] += done.sample_us
        self._counters["own_ns"] += time.perf_counter_ns() - start

    def _commit_row(self, sequence: Sequence, sent: StepRow, verdict: RowDone) -> None:
        if not sequence.is_running(sent.generation):
            return  # cancelled or preempted while the step ran; the verdict is void
        match verdict.status:
            case Status.OK:
                sequence.commit(verdict, len(sent.draft_ids))
                if sequence.is_finished:
                    self._forget(sequence)
            case Status.PREEMPTED | Status.UNKNOWN_REQUEST:
                self._counters["preempted"] += 1
                sequence.evicted()
            case Status.NUMERIC_ERROR:
                self._fail(sequence, NumericError(f"the model's output was not finite: {verdict.detail}"))
            case Status.INTERNAL:
                self._fail(sequence, SpecsplitError(f"the verifier failed: {verdict.detail}"))
            case _:
                self._target.violated(f"row {sent} was refused: {verdict.status.name} {verdict.detail}")
                self._fail(sequence, ProtocolError(f"the verifier refused a row: {verdict.status.name}"))

    # --- what the verifier says ---------------------------------------------------------------------------

    def _on_event(self, event: Capacity | Opened | Preempted) -> None:
        if isinstance(event, Opened):
            self._on_opened(event)
        elif isinstance(event, Preempted):
            sequence = self._sequences.get(event.request_id)
            if sequence is not None and sequence.is_open(event.generation):
                self._counters["preempted"] += 1
                sequence.evicted()
        self._wake.set()

    def _on_opened(self, event: Opened) -> None:
        sequence = self._sequences.get(event.request_id)
        if sequence is None or sequence.generation != event.generation:
            return  # cancelled meanwhile; its Close is on the way
        if sequence.phase is not Phase.OPENING:
            return  # preempted before this answer was read
        match event.status:
            case Status.OK:
                sequence.opened(event.cached_tokens)
            case Status.DRAINING:
                self._target.is_draining = True
                sequence.evicted()
            case Status.TOO_LONG:
                self._fail(sequence, PromptTooLong(event.detail, field="prompt"))
            case _:
                self._target.violated(f"open of {event.request_id.hex()}: {event.status.name} {event.detail}")
                self._fail(sequence, ProtocolError(f"the verifier refused it: {event.status.name}"))

    def _on_lost(self) -> None:
        """Every request that was at the verifier waits for its successor; no client notices.

        But for one that has lost verifier after verifier: it may be what kills them.
        """
        for sequence in [s for s in self._sequences.values() if s.is_open(s.generation)]:
            sequence.num_lost += 1
            if sequence.num_lost > MAX_LOST_VERIFIERS:
                self._fail(sequence, Unavailable(f"the verifier was lost {sequence.num_lost} times"))
            else:
                sequence.evicted()
        self._wake.set()

    async def _watch(self) -> None:
        """Fails requests that waited too long for a verifier; gives one up that does not answer an Open.

        A step that is outstanding has its own time-out; a verifier may fall silent when there is none.
        """
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
            down_since = self._target.down_since
            if down_since is not None and now - down_since > self._settings.verifier_wait_seconds:
                for sequence in list(self._sequences.values()):
                    self._fail(sequence, Unavailable("no verifier answered in time"))
            elif any(now - since > self._settings.step_timeout_seconds for since in opening.values()):
                self._counters["open_timeouts"] += 1
                self._target.link.drop("no answer to an Open")

    # --- the end of a request -----------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: SpecsplitError) -> None:
        self._counters[f"failed_{error.code}"] += 1
        is_at_verifier = sequence.is_open(sequence.generation)
        sequence.fail(error)
        self._forget(sequence, is_at_verifier=is_at_verifier)

    def _forget(self, sequence: Sequence, *, is_at_verifier: bool = True) -> None:
        """Frees what the request holds here, at the verifier and at the drafter."""
        del self._sequences[sequence.request.request_id]
        if is_at_verifier and sequence.phase is not Phase.WAITING:
            self._target.close(sequence.close())
        if self._drafting is not None:
            self._drafting.close(sequence)
        sequence.phase = Phase.FINISHED
        if not self._sequences:
            self._empty.set()
        self._wake.set()


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
