"""The life of one request in the gateway: its committed tokens, its phase, what it has used. Knows no I/O.

WAITING --open--> OPENING --Opened--> RUNNING --finish--> (forgotten)
   ^________________|___________________|   preempted, or the verifier's stream broke
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from dataclasses import dataclass

from specsplit.core.digest import TokenDigest
from specsplit.core.errors import SpecsplitError
from specsplit.core.types import (
    CloseRequest,
    Delta,
    Finished,
    FinishReason,
    NoDraftReason,
    OpenRequest,
    RowDone,
    Usage,
)
from specsplit.gateway.request import AdmittedRequest
from specsplit.gateway.text.output import OutputText
from specsplit.gateway.text.tokenizer import Tokenizer


class Phase(enum.Enum):
    WAITING = "waiting"  # not at any verifier
    OPENING = "opening"  # Open sent, Opened not yet here
    RUNNING = "running"  # open; prefills, then decodes
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Counted:
    """What one commit adds to the usage."""

    drafted: int = 0
    accepted: int = 0
    committed: int = 0


class Sequence:
    """One admitted request. `events` carries what the client is sent: Deltas, then Finished or an error."""

    def __init__(self, request: AdmittedRequest, tokenizer: Tokenizer, *, admitted_ns: int) -> None:
        self.request = request
        self.phase = Phase.WAITING
        self.generation = 0
        self.is_at_verifier = False  # opened there, and not known to be forgotten
        self.num_lost = 0  # times that the verifier died or fell silent while it held this
        self.num_preempted = 0
        self.replicas: list[str] = []  # addresses of the verifiers that had it
        self.block_hashes: list[bytes] | None = None  # of the prompt, once routing asked for them
        self.predicted_cached_tokens: int | None = None
        self.admitted_ns = admitted_ns  # all times: nanoseconds since the Unix epoch
        self.opened_ns: int | None = None  # by a verifier, for the first time
        self.first_token_ns: int | None = None
        self.token_ids = list(request.prompt_ids)  # committed: prompt, then output
        self.num_computed = 0  # committed tokens whose KV the verifier holds
        self.events: asyncio.Queue[Delta | Finished | SpecsplitError] = asyncio.Queue()
        self.drafter_epoch = 0  # stream of the drafter on which it was last told about this generation
        self.drafter_generation = 0
        self.drafter_len = 0  # committed tokens that the drafter was told there
        self._digest = TokenDigest(request.prompt_ids)
        self._text = OutputText(tokenizer, request.stop)
        self._cached_tokens: int | None = None
        self._num_steps = 0
        self._num_drafted = 0
        self._accepted_by_position: list[int] = []
        self._no_draft_reasons: Counter[NoDraftReason] = Counter()  # by decoding steps
        self._prefill_reason: NoDraftReason | None = (
            None  # of the first token, the reason if it is the only one
        )
        self._finish_reason: FinishReason | None = None

    def is_open(self, generation: int) -> bool:
        """Held by a verifier, or about to be."""
        return self.phase in (Phase.OPENING, Phase.RUNNING) and self.generation == generation

    def is_running(self, generation: int) -> bool:
        return self.phase is Phase.RUNNING and self.generation == generation

    @property
    def is_finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def finish_reason(self) -> FinishReason:
        """Of a request that finished by itself."""
        assert self._finish_reason is not None
        return self._finish_reason

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def digest(self) -> int:
        return self._digest.value

    @property
    def num_uncomputed(self) -> int:
        """Committed tokens still to compute; 1 while decoding, at least 1 always."""
        return len(self.token_ids) - self.num_computed

    def open(self) -> OpenRequest:
        """WAITING -> OPENING with the next generation."""
        assert self.phase is Phase.WAITING, self.phase
        self.phase = Phase.OPENING
        self.generation += 1
        self.is_at_verifier = True
        return OpenRequest(
            request_id=self.request.request_id,
            generation=self.generation,
            order=self.request.order,
            prompt_ids=self.request.prompt_ids,
            output_ids=self.token_ids[self.num_prompt :],
            sampling=self.request.sampling,
            cache_salt=self.request.cache_salt,
            traceparent=self.request.trace.traceparent,
        )

    def opened(self, cached_tokens: int, *, at_ns: int) -> None:
        """OPENING -> RUNNING."""
        assert self.phase is Phase.OPENING, self.phase
        self.phase = Phase.RUNNING
        self.opened_ns = self.opened_ns or at_ns
        self.num_computed = cached_tokens
        if self._cached_tokens is None:
            self._cached_tokens = min(cached_tokens, self.num_prompt)

    def evicted(self) -> None:
        """Back to WAITING: the verifier no longer has it. Committed tokens stay."""
        assert self.phase in (Phase.OPENING, Phase.RUNNING), self.phase
        self.phase = Phase.WAITING
        self.is_at_verifier = False
        self.num_computed = 0

    def close(self) -> CloseRequest:
        return CloseRequest(self.request.request_id, self.generation)

    def commit(
        self,
        row: RowDone,
        *,
        num_drafts: int,
        no_draft_reason: NoDraftReason | None,
        is_prefill: bool,
        at_ns: int,
    ) -> Counted:
        """Applies an OK verdict: extends the committed tokens, cuts at a stop string, tells the client.

        Tokens past a stop string are dropped from ids, scores, usage and acceptance counts alike; the token
        that completes it stays, its text does not.
        """
        assert self.phase is Phase.RUNNING, self.phase
        assert row.base_len == len(self.token_ids), (row.base_len, len(self.token_ids))
        self.num_computed = row.num_computed
        if not row.committed_ids:  # a prefill chunk
            return Counted()
        text, num_kept, finish = self._extend_text(row)
        kept = tuple(row.committed_ids[:num_kept])
        self.token_ids.extend(kept)
        self._digest.append(kept)
        self.first_token_ns = self.first_token_ns or at_ns
        num_drafted = min(num_drafts, num_kept) if finish is not None else num_drafts
        counted = Counted(num_drafted, min(row.num_accepted, num_kept), num_kept)
        self._count(counted)
        if no_draft_reason is not None and is_prefill:
            self._prefill_reason = no_draft_reason
        elif no_draft_reason is not None:
            self._no_draft_reasons[no_draft_reason] += 1
        if finish is not None and not self._text.is_stopped:
            text += self._text.finish()
        self.events.put_nowait(Delta(text, kept, row.logprobs[:num_kept], row.margins[:num_kept]))
        if finish is not None:
            self.phase = Phase.FINISHED
            self._finish_reason = finish
            self.events.put_nowait(Finished(finish, self.usage()))
        return counted

    def fail(self, error: SpecsplitError) -> None:
        """Ends the request with an error to the client."""
        self.phase = Phase.FINISHED
        self.events.put_nowait(error)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_output,
            cached_tokens=self._cached_tokens or 0,
            steps=self._num_steps,
            drafted=self._num_drafted,
            accepted=sum(self._accepted_by_position),
            accepted_by_position=tuple(self._accepted_by_position),
            no_draft_reason=self._no_draft_reason(),
        )

    def _extend_text(self, row: RowDone) -> tuple[str, int, FinishReason | None]:
        """Text that became final, how many committed ids are kept, and why the request ends if it does."""
        ids = row.committed_ids
        text = ""
        for index, token_id in enumerate(ids):
            is_stop_token = row.finish_reason is FinishReason.STOP and index == len(ids) - 1
            if is_stop_token:  # counted as a token, but its text is not part of the output
                break
            num_output = self.num_output + index + 1
            can_stop = num_output > self.request.sampling.min_tokens
            text += self._text.push(token_id, can_stop=can_stop)
            if self._text.is_stopped:
                return text, index + 1, FinishReason.STOP
        return text, len(ids), row.finish_reason

    def _count(self, counted: Counted) -> None:
        self._num_steps += 1
        self._num_drafted += counted.drafted
        missing = counted.accepted - len(self._accepted_by_position)
        self._accepted_by_position.extend([0] * missing)
        for position in range(counted.accepted):
            self._accepted_by_position[position] += 1

    def _no_draft_reason(self) -> NoDraftReason | None:
        """The one of most steps, when nothing was drafted in any."""
        if self._num_drafted:
            return None
        if not self._no_draft_reasons:
            return self._prefill_reason
        return max(self._no_draft_reasons, key=lambda reason: (self._no_draft_reasons[reason], -reason))
