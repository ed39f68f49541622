"""Asks the drafter for one step's drafts, and fails open. Knows no verifier and no scheduling.

A drafter that is away, late, full or lying costs its rows their drafts in that step, nothing else. While an
answer is outstanding no further one is asked for, so a drafter that hangs delays one step only; when the
answer does not come at all, the stream is opened anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from specsplit.core.errors import ProtocolError
from specsplit.core.types import (
    WIRE_VERSION,
    CloseDraft,
    DraftBatch,
    DraftBatchDone,
    DraftCommand,
    DrafterDescription,
    DraftRow,
    DraftRowDone,
    DraftStatus,
    RequestId,
    TokenIds,
)
from specsplit.gateway.link import Link
from specsplit.gateway.scheduler import PlannedRow
from specsplit.gateway.sequence import Sequence
from specsplit.gateway.wires import DrafterWire

GIVE_UP_SECONDS = 10.0  # an answer this late will not come: the stream is opened anew


@dataclass(slots=True)
class Drafts:
    """One step's drafts by request; one that is neither here nor in `without_match` got no answer."""

    ids: dict[RequestId, TokenIds] = field(default_factory=dict)
    without_match: set[RequestId] = field(default_factory=set)  # asked for, and there was nothing to propose
    draft_us: int | None = None  # the drafter's own time
    traceparent: str = ""  # context of the drafter's span


class Drafting:
    """Asks one drafter, on a stream of its own."""

    def __init__(
        self, address: str, *, timeout_seconds: float, tokenizer_digest: str, counters: Counter[str]
    ) -> None:
        self.link: Link[DrafterDescription, DraftCommand, DraftBatchDone] = Link(
            "drafter",
            address,
            DrafterWire(),
            accept=self._accept,
            on_event=self._on_done,
            on_down=self._on_down,
        )
        self.name = ""  # of the proposer, once the drafter has described itself
        self._timeout_seconds = timeout_seconds
        self._tokenizer_digest = tokenizer_digest
        self._counters = counters
        self.max_draft = 0
        self._next_batch_id = 1
        self._answer: asyncio.Future[DraftBatchDone] | None = None
        self._asked_at = 0.0
        self._outstanding: dict[RequestId, Sequence] = {}  # whose rows the outstanding batch holds

    async def draft(self, plan: Rows[PlannedRow], vocab_size: int) -> Drafts:
        rows = [row for row in plan if row.max_draft > 0]
        if not rows or not self.link.is_up:
            return Drafts()
        if self._answer is not None:
            self._counters["draft_skipped_steps"] += 1
            if time.monotonic() - self._asked_at > GIVE_UP_SECONDS:
                self.link.drop(f"no answer to batch {self._next_batch_id - 1}")
            return Drafts()
        batch = DraftBatch(self._next_batch_id, tuple(self._row(row) for row in rows))
        self._next_batch_id += 1
        self._outstanding = {row.sequence.request.request_id: row.sequence for row in rows}
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._asked_at = time.monotonic()
        self.link.send(batch)
        done, _ = await asyncio.wait((answer,), timeout=self._timeout_seconds)
        if not done:
            self._counters["draft_timeouts"] += 1
            return Drafts()
        if answer.cancelled():  # the stream broke
            return Drafts()
        return self._drafts(answer.result(), rows, vocab_size)

    def close(self, sequence: Sequence) -> None:
        """The drafter may forget the request, if it knows it."""
        if self.link.is_up and sequence.drafter_epoch == self.link.epoch:
            self.link.send(CloseDraft(sequence.request.request_id))
        sequence.drafter_epoch = 0  # epochs of another stream mean other things

    def _row(self, planned: PlannedRow) -> DraftRow:
        sequence = planned.sequence
        is_known = (sequence.drafter_epoch, sequence.drafter_generation) == (
            self.link.epoch,
            sequence.generation,
        )
        start = sequence.drafter_len if is_known else 0
        sequence.drafter_epoch = self.link.epoch
        sequence.drafter_generation = sequence.generation
        sequence.drafter_len = len(sequence.token_ids)
        return DraftRow(
            request_id=sequence.request.request_id,
            generation=sequence.generation,
            base_len=len(sequence.token_ids),
            digest=sequence.digest,
            new_ids=sequence.token_ids[start:],
            max_draft=min(planned.max_draft, self.max_draft),
            prompt_len=sequence.num_prompt,
            sampling=None if is_known else sequence.request.sampling,
            traceparent="" if is_known else sequence.request.trace.traceparent,
        )

    def _drafts(self, done: DraftBatchDone, rows: Rows[PlannedRow], vocab_size: int) -> Drafts:
        granted = {row.sequence.request.request_id: row for row in rows}
        drafts = Drafts(draft_us=done.draft_us, traceparent=done.traceparent)
        for row in done.rows:
            if not self._is_usable(row, granted.get(row.request_id), vocab_size):
                continue
            if row.draft_ids:
                drafts.ids[row.request_id] = row.draft_ids
            else:
                drafts.without_match.add(row.request_id)
        return drafts

    def _is_usable(self, row: DraftRowDone, planned: PlannedRow | None, vocab_size: int) -> bool:
        """Whether the drafter answered what it was asked; anything else is counted and costs the draft."""
        if row.status is not DraftStatus.OK:
            self._counters[f"draft_{row.status.name.lower()}"] += 1
            return False
        if (
            planned is None
            or row.generation != planned.sequence.generation
            or row.base_len != len(planned.sequence.token_ids)
            or len(row.draft_ids) > planned.max_draft
            or any(token_id >= vocab_size for token_id in row.draft_ids)
            or row.draft_probs
        ):
            self._counters["draft_refused"] += 1
            return False
        return True

    def _accept(self, description: DrafterDescription) -> None:
        if description.wire_version != WIRE_VERSION:
            raise ProtocolError(
                f"wire version {description.wire_version}, not {WIRE_VERSION}", field="wire_version"
            )
        if description.tokenizer_digest not in ("", self._tokenizer_digest):
            raise ProtocolError(
                f"the drafter's tokenizer {description.tokenizer_digest} is not the target's "
                f"{self._tokenizer_digest}",
                field="tokenizer_digest",
            )
        self.max_draft = description.max_draft
        self.name = description.name

    def _on_done(self, done: DraftBatchDone) -> None:
        if self._answer is None or done.batch_id != self._next_batch_id - 1:
            self._counters["draft_refused"] += 1
            raise ProtocolError(f"answer to batch {done.batch_id}, which is not outstanding")
        for row in done.rows:
            sequence = self._outstanding.get(row.request_id)
            if row.status is not DraftStatus.OK and sequence is not None:
                sequence.drafter_epoch = 0  # tell it everything again
        self._outstanding = {}
        self._answer.set_result(done)
        self._answer = None

    def _on_down(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
        self._answer = None
        self._outstanding = {}
