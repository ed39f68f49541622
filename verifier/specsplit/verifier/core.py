"""Holds the open requests and runs steps, by the commands alone. Knows no transport and no threads.

A step reads as three verbs: `schedule` checks the rows and gives them blocks, `run` computes and decides,
`commit` appends what was accepted and trims the rest. Time is measured here; nothing is decided by it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specsplit.core.block_hash import request_root
from specsplit.core.trace_context import TraceContext
from specsplit.core.types import (
    CloseRequest,
    Opened,
    OpenRequest,
    Preempted,
    RequestId,
    RowDone,
    Status,
    Step,
    StepRow,
)
from specsplit.engine.batch import BLOCK_SIZE, Row
from specsplit.engine.block_pool import BlockPool
from specsplit.verifier.checks import Limits, Refusal, answer_row, refuse_open, refuse_step, refused
from specsplit.verifier.decision import Decision, decide
from specsplit.verifier.sequence import Owner, RowKey, SequenceState, Verdict, num_blocks_for

log = logging.getLogger(__name__)


class TargetModel(Protocol):
    """Writes the rows' KV and returns [sum(num_logits), vocab] float32 logits, rows in order."""

    def forward(self, rows: Sequence[Row]) -> Tensor: ...


@dataclass(slots=True, eq=False)
class RowWork:
    """One row of a step on its way to its verdict; it runs while it has none."""

    owner: Owner
    row: StepRow
    verdict: RowDone | None = None


@dataclass(slots=True)
class BatchDone:
    """What became of the steps that ran together: for each step a verdict for each of its rows."""

    steps: list[tuple[RowDone, ...]] = field(default_factory=list)
    preempted: list[tuple[Owner, Preempted]] = field(default_factory=list)
    forward_us: int = 0
    sample_us: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    traces: tuple[TraceContext, ...] = ()
    """Of the sampled requests in it."""


class VerifierCore:
    """`counts` are totals since the start, by name."""

    def __init__(
        self,
        model: TargetModel,
        limits: Limits,
        *,
        eos_token_ids: Iterable[int],
        namespace: bytes,
        is_tracked: bool = False,
    ) -> None:
        """`is_tracked`: the pool keeps what changes in its cache, for somebody who takes it."""
        assert 1 <= limits.max_sequence_tokens <= limits.num_blocks * BLOCK_SIZE, (
            "one sequence has to fit the pool"
        )
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, is_tracked=is_tracked)
        self.sequences: dict[RequestId, SequenceState] = {}
        self.is_draining = False
        self.counts: Counter[str] = Counter()
        self._model = model
        self._namespace = namespace
        # Some configurations name ids past the logits: those are never sampled and must not be masked.
        self._eos = frozenset(id_ for id_ in eos_token_ids if id_ < limits.vocab_size)

    def open(self, owner: Owner, request: OpenRequest) -> Opened:
        """Takes the cached prefix, but never the block of the last token: that one is sampled from."""
        held = self.sequences.get(request.request_id)
        refusal = refuse_open(owner, request, held, self.limits, is_draining=self.is_draining)
        if refusal is not None:
            self.counts[f"opens_{refusal.status.name.lower()}"] += 1
            return Opened(
                request.request_id,
                request.generation,
                refusal.status,
                self.pool.num_free,
                detail=refusal.detail,
            )
        if held is not None:
            self._forget(held)
        root = request_root(self._namespace, cache_salt=request.cache_salt)
        sequence = SequenceState.opened(owner, request, eos_token_ids=self._eos, root=root)
        sequence.block_table = self.pool.match_prefix(
            sequence.block_hashes((sequence.base_len - 1) // BLOCK_SIZE)
        )
        sequence.num_cached_blocks = len(sequence.block_table)
        sequence.num_computed = sequence.num_cached_blocks * BLOCK_SIZE
        self.sequences[request.request_id] = sequence
        self.counts["opens_ok"] += 1
        return Opened(
            request.request_id,
            request.generation,
            Status.OK,
            self.pool.num_free,
            cached_tokens=sequence.num_computed,
        )

    def close(self, owner: Owner, request: CloseRequest) -> None:
        """Other streams', unknown and newer requests are left alone: a preemption may have crossed this."""
        sequence = self.sequences.get(request.request_id)
        if sequence is not None and sequence.owner == owner and request.generation >= sequence.generation:
            self._forget(sequence)

    def close_owner(self, owner: Owner) -> None:
        for sequence in [s for s in self.sequences.values() if s.owner == owner]:
            self._forget(sequence)

    @torch.inference_mode()
    def step(self, batch: Sequence[tuple[Owner, Step]]) -> BatchDone:
        done = BatchDone()
        steps = self._schedule(batch, done)
        works = [work for rows in steps for work in rows if work.verdict is None]
        decisions = self._run(works, done)
        if decisions:
            self._commit(works, decisions, done)
        for rows in steps:
            verdicts = tuple(work.verdict for work in rows if work.verdict is not None)
            assert len(verdicts) == len(rows), "a row was left without a verdict"
            done.steps.append(verdicts)
            self.counts.update(f"rows_{verdict.status.name.lower()}" for verdict in verdicts)
        self.counts["steps"] += len(batch)
        self.counts["batches"] += 1
        return done

    # --- schedule -----------------------------------------------------------------------------------------

    def _schedule(self, batch: Sequence[tuple[Owner, Step]], done: BatchDone) -> list[list[RowWork]]:
        """Answers the rows that do not run and gives the others blocks, in the order of the requests."""
        steps: list[list[RowWork]] = []
        running: list[tuple[SequenceState, RowWork]] = []
        seen: set[RequestId] = set()
        for owner, step in batch:
            refusal = refuse_step(step, self.limits)
            steps.append([RowWork(owner, row) for row in step.rows])
            for work in steps[-1]:
                sequence = self.sequences.get(work.row.request_id)
                work.verdict = (
                    refused(work.row, refusal)
                    if refusal is not None
                    else answer_row(
                        owner, work.row, sequence, self.limits, is_repeated=work.row.request_id in seen
                    )
                )
                if work.verdict is None:
                    assert sequence is not None
                    seen.add(work.row.request_id)
                    running.append((sequence, work))
                else:
                    self._count_answer(work.verdict)
        for sequence, work in sorted(running, key=lambda pair: pair[0].order):
            self._allocate(sequence, work.row, done)
        for sequence, work in running:
            if self.sequences.get(work.row.request_id) is not sequence:
                work.verdict = refused(work.row, Refusal(Status.PREEMPTED, "its blocks were taken"))
        return steps

    def _count_answer(self, answer: RowDone) -> None:
        if answer.is_replay:
            self.counts["replays"] += 1
        if answer.status is Status.DIGEST_MISMATCH:  # two sides hold other ids for one base: a bug somewhere
            self.counts["invariant_violations"] += 1
            log.error("request %s: digests differ at %d", answer.request_id.hex(), answer.base_len)

    def _allocate(self, sequence: SequenceState, row: StepRow, done: BatchDone) -> None:
        """Blocks for all that `row` computes; when none is left, the last in order that holds any loses all.

        The first in order always gets through: nothing goes before it, and one sequence fits the whole pool.
        """
        num_blocks = num_blocks_for(row.num_computed + row.num_tokens + len(row.draft_ids))
        while self.sequences.get(row.request_id) is sequence and len(sequence.block_table) < num_blocks:
            if self.pool.num_free > 0:
                sequence.block_table.append(self.pool.allocate())
                continue
            holders = (s for s in self.sequences.values() if s.block_table or s is sequence)
            last = max(holders, key=lambda s: s.order)
            self._forget(last)
            self.counts["preemptions"] += 1
            done.preempted.append(
                (last.owner, Preempted(last.request_id, last.generation, self.pool.num_free))
            )

    # --- run ----------------------------------------------------------------------------------------------

    def _run(self, works: Sequence[RowWork], done: BatchDone) -> list[Decision]:
        """One decision for each row; none when the step failed and all its rows have their verdict."""
        if not works:
            return []
        done.num_rows = len(works)
        traces = (self.sequences[work.row.request_id].trace for work in works)
        done.traces = tuple(trace for trace in traces if trace is not None)
        done.num_tokens = sum(work.row.num_tokens + len(work.row.draft_ids) for work in works)
        started = computed = time.perf_counter()
        try:
            logits = self._model.forward([self._model_row(work.row) for work in works])
            computed = time.perf_counter()  # on CUDA the device may still work: sampling waits for it
            sampling = [work.row for work in works if work.row.is_sampling]
            decided = iter(
                decide(
                    logits,
                    [(self.sequences[row.request_id], row.draft_ids) for row in sampling],
                    max_sequence_tokens=self.limits.max_sequence_tokens,
                )
            )
            return [next(decided) if work.row.is_sampling else Decision() for work in works]
        except Exception as error:  # nothing is committed yet, so what fails here costs only these rows
            log.exception("a step of %d rows failed", len(works))
            self.counts["step_failures"] += 1
            for work in works:
                self._forget(self.sequences[work.row.request_id])
                work.verdict = refused(work.row, Refusal(Status.INTERNAL, f"{type(error).__name__}: {error}"))
            return []
        finally:
            done.forward_us = _microseconds(computed - started)
            done.sample_us = _microseconds(time.perf_counter() - computed)

    def _model_row(self, row: StepRow) -> Row:
        sequence = self.sequences[row.request_id]
        return Row(
            token_ids=[*sequence.ids[row.num_computed : row.num_computed + row.num_tokens], *row.draft_ids],
            start=row.num_computed,
            block_table=sequence.block_table,
            num_logits=1 + len(row.draft_ids) if row.is_sampling else 0,
        )

    # --- commit -------------------------------------------------------------------------------------------

    def _commit(self, works: Sequence[RowWork], decisions: Sequence[Decision], done: BatchDone) -> None:
        started = time.perf_counter()
        for work, decision in zip(works, decisions, strict=True):
            sequence = self.sequences[work.row.request_id]
            if decision.is_finite:
                work.verdict = self._commit_row(sequence, work.row, decision)
            else:
                self.pool.uncache(sequence.block_table)  # its KV may be what was not finite
                self._forget(sequence)
                work.verdict = refused(work.row, Refusal(Status.NUMERIC_ERROR, "logits are not finite"))
        done.sample_us += _microseconds(time.perf_counter() - started)

    def _commit_row(self, sequence: SequenceState, row: StepRow, decision: Decision) -> RowDone:
        """The KV of accepted drafts is there; that of the token sampled after them is not."""
        sequence.append(decision.committed_ids)
        sequence.num_computed = (
            sequence.base_len - 1 if row.is_sampling else row.num_computed + row.num_tokens
        )
        sequence.finish_reason = decision.finish_reason
        num_kept = num_blocks_for(sequence.num_computed)
        self.pool.release(sequence.block_table[num_kept:])
        del sequence.block_table[num_kept:]
        num_full = sequence.num_computed // BLOCK_SIZE
        hashes = sequence.block_hashes(num_full)
        for index in range(sequence.num_cached_blocks, num_full):
            sequence.block_table[index] = self.pool.cache(sequence.block_table[index], hashes[index])
        sequence.num_cached_blocks = num_full
        if sequence.finish_reason is not None:
            self._free(sequence)
        verdict = RowDone(
            request_id=row.request_id,
            generation=row.generation,
            base_len=row.base_len,
            status=Status.OK,
            num_computed=sequence.num_computed,
            committed_ids=decision.committed_ids,
            num_accepted=decision.num_accepted,
            finish_reason=decision.finish_reason,
            logprobs=decision.logprobs,
            margins=decision.margins,
        )
        sequence.last = Verdict(RowKey.of(row), verdict)
        return verdict

    def _forget(self, sequence: SequenceState) -> None:
        self._free(sequence)
        del self.sequences[sequence.request_id]
        assert self.sequences or self.pool.num_free == self.pool.num_blocks, "blocks leaked"

    def _free(self, sequence: SequenceState) -> None:
        """Full blocks stay in the cache until their memory is needed."""
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_cached_blocks = 0


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
