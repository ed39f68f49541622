"""Says whether an open or a row may run, and why not. Pure: changes nothing, knows no model and no memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specsplit.core.types import OpenRequest, RowDone, Status, Step, StepRow, VerificationMode
from specsplit.verifier.sequence import Owner, RowKey, SequenceState


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that do not change while the verifier runs."""

    vocab_size: int
    num_blocks: int
    max_sequence_tokens: int
    max_step_tokens: int
    max_step_rows: int


@dataclass(frozen=True, slots=True)
class Refusal:
    status: Status
    detail: str


def refuse_open(
    owner: Owner, request: OpenRequest, held: SequenceState | None, limits: Limits, *, is_draining: bool
) -> Refusal | None:
    if held is not None and request.generation <= held.generation:
        if held.owner != owner:
            return Refusal(Status.NOT_OWNER, "another stream holds this request")
        return Refusal(Status.STALE_GENERATION, f"generation {held.generation} is open")
    if is_draining:
        return Refusal(Status.DRAINING, "the verifier is draining")
    if request.sampling.verification is not VerificationMode.COUPLED:
        return Refusal(Status.UNSUPPORTED, f"verification: {request.sampling.verification.name.lower()}")
    for name, ids in (
        ("prompt_ids", request.prompt_ids),
        ("output_ids", request.output_ids),
        ("stop_token_ids", request.sampling.stop_token_ids),
    ):
        if ids and max(ids) >= limits.vocab_size:
            return Refusal(
                Status.INVALID, f"{name}: {max(ids)} is past the vocabulary of {limits.vocab_size}"
            )
    if not request.prompt_ids:
        return Refusal(Status.INVALID, "prompt_ids: must hold at least one id")
    if len(request.output_ids) >= request.sampling.max_tokens:
        return Refusal(Status.INVALID, "output_ids: leave no token of max_tokens to sample")
    if len(request.prompt_ids) + len(request.output_ids) + 1 > limits.max_sequence_tokens:
        limit = limits.max_sequence_tokens
        return Refusal(Status.TOO_LONG, f"prompt_ids: at most {limit} tokens with one to sample")
    return None


def refuse_step(step: Step, limits: Limits) -> Refusal | None:
    """A step past the budget is refused as a whole: there is no right half of it."""
    tokens = num_step_tokens(step)
    if tokens > limits.max_step_tokens:
        detail = f"rows: {tokens} tokens are more than max_step_tokens {limits.max_step_tokens}"
        return Refusal(Status.INVALID, detail)
    if len(step.rows) > limits.max_step_rows:
        detail = f"rows: {len(step.rows)} are more than max_step_rows {limits.max_step_rows}"
        return Refusal(Status.INVALID, detail)
    return None


def num_step_tokens(step: Step) -> int:
    return sum(row.num_tokens + len(row.draft_ids) for row in step.rows)


def answer_row(
    owner: Owner, row: StepRow, held: SequenceState | None, limits: Limits, *, is_repeated: bool
) -> RowDone | None:
    """The answer to a row that does not run: its verdict of before, or a refusal; None when it runs."""
    refusal = _refuse_sender(owner, row, held, is_repeated=is_repeated)
    if refusal is not None:
        return refused(row, refusal)
    assert held is not None
    if held.last is not None and held.last.key == RowKey.of(row):
        return replace(held.last.done, is_replay=True)
    refusal = _refuse_content(row, held, limits)
    return replace(refused(row, refusal), num_computed=held.num_computed) if refusal is not None else None


def refused(row: StepRow, refusal: Refusal) -> RowDone:
    return RowDone(row.request_id, row.generation, row.base_len, refusal.status, detail=refusal.detail)


def _refuse_sender(
    owner: Owner, row: StepRow, held: SequenceState | None, *, is_repeated: bool
) -> Refusal | None:
    if held is None:
        return Refusal(Status.UNKNOWN_REQUEST, "not open here")
    if held.owner != owner:
        return Refusal(Status.NOT_OWNER, "another stream holds this request")
    if row.generation != held.generation:
        return Refusal(Status.STALE_GENERATION, f"generation {held.generation} is open")
    if is_repeated:
        return Refusal(Status.INVALID, "request_id: twice in one step")
    return None


def _refuse_content(row: StepRow, held: SequenceState, limits: Limits) -> Refusal | None:
    if (row.base_len, row.num_computed) != (held.base_len, held.num_computed):
        return Refusal(Status.STALE_BASE, f"held: base_len {held.base_len}, num_computed {held.num_computed}")
    if row.digest != held.digest.value:
        return Refusal(Status.DIGEST_MISMATCH, f"held: {held.digest.value:016x}")
    if held.finish_reason is not None:
        return Refusal(Status.INVALID, "request_id: the request has ended")
    if not 1 <= row.num_tokens <= row.base_len - row.num_computed:
        return Refusal(Status.INVALID, "num_tokens: must stay within base_len")
    if row.draft_ids and not row.is_sampling:
        return Refusal(Status.INVALID, "draft_ids: a prefill chunk carries none")
    if row.draft_ids and max(row.draft_ids) >= limits.vocab_size:
        detail = f"draft_ids: {max(row.draft_ids)} is past the vocabulary of {limits.vocab_size}"
        return Refusal(Status.INVALID, detail)
    if row.base_len + len(row.draft_ids) + 1 > limits.max_sequence_tokens:
        return Refusal(
            Status.INVALID, f"draft_ids: past the longest sequence of {limits.max_sequence_tokens} tokens"
        )
    if row.draft_probs:
        return Refusal(Status.UNSUPPORTED, "draft_probs")
    if row.assumes is not None:
        return Refusal(Status.UNSUPPORTED, "assumes")
    return None
