"""Conversion of the verifier's messages. Knows nothing of what they do."""

from __future__ import annotations

from typing import assert_never

from specsplit.core.codec import common
from specsplit.core.errors import InvalidRequest
from specsplit.core.types import (
    MAX_DRAFT,
    Assumption,
    Capacity,
    CloseRequest,
    FinishReason,
    Opened,
    OpenRequest,
    Preempted,
    RowDone,
    Status,
    Step,
    StepDone,
    StepRow,
    VerifierCommand,
    VerifierDescription,
    VerifierEvent,
)
from specsplit.v1 import common_pb2, verifier_pb2


def description_from_pb(pb: verifier_pb2.VerifierDescription) -> VerifierDescription:
    return VerifierDescription(
        wire_version=pb.wire_version,
        model=pb.model,
        revision=pb.revision,
        dtype=pb.dtype,
        numerics=pb.numerics,
        tokenizer_digest=pb.tokenizer_digest,
        vocab_size=pb.vocab_size,
        max_sequence_tokens=pb.max_sequence_tokens,
        block_size=pb.block_size,
        num_blocks=pb.num_blocks,
        max_step_tokens=pb.max_step_tokens,
        max_step_rows=pb.max_step_rows,
        tensor_parallel=pb.tensor_parallel,
        pipeline_parallel=pb.pipeline_parallel,
        incarnation=pb.incarnation,
        registry_namespace=pb.registry_namespace,
        eos_token_ids=tuple(pb.eos_token_ids),
    )


def description_to_pb(d: VerifierDescription) -> verifier_pb2.VerifierDescription:
    return verifier_pb2.VerifierDescription(
        wire_version=d.wire_version,
        model=d.model,
        revision=d.revision,
        dtype=d.dtype,
        numerics=d.numerics,
        tokenizer_digest=d.tokenizer_digest,
        vocab_size=d.vocab_size,
        max_sequence_tokens=d.max_sequence_tokens,
        block_size=d.block_size,
        num_blocks=d.num_blocks,
        max_step_tokens=d.max_step_tokens,
        max_step_rows=d.max_step_rows,
        tensor_parallel=d.tensor_parallel,
        pipeline_parallel=d.pipeline_parallel,
        incarnation=d.incarnation,
        registry_namespace=d.registry_namespace,
        eos_token_ids=d.eos_token_ids,
    )


def command_from_pb(pb: verifier_pb2.VerifierCommand) -> VerifierCommand:
    """Raises InvalidRequest naming the field; a command that fails here has no effect."""
    match pb.WhichOneof("command"):
        case "open":
            return _open_from_pb(pb.open)
        case "step":
            return Step(pb.step.step_id, tuple(_row_from_pb(row) for row in pb.step.rows))
        case "close":
            return CloseRequest(common.request_id(pb.close.request_id), pb.close.generation)
        case _:
            raise InvalidRequest("the command is empty or of a kind unknown here", field="command")


def command_to_pb(command: VerifierCommand) -> verifier_pb2.VerifierCommand:
    match command:
        case OpenRequest():
            return verifier_pb2.VerifierCommand(open=_open_to_pb(command))
        case Step():
            rows = [_row_to_pb(row) for row in command.rows]
            return verifier_pb2.VerifierCommand(step=verifier_pb2.Step(step_id=command.step_id, rows=rows))
        case CloseRequest():
            return verifier_pb2.VerifierCommand(
                close=verifier_pb2.CloseRequest(request_id=command.request_id, generation=command.generation)
            )
        case _:
            assert_never(command)


def event_from_pb(pb: verifier_pb2.VerifierEvent) -> VerifierEvent:
    match pb.WhichOneof("event"):
        case "capacity":
            return Capacity(pb.capacity.max_steps_in_flight, pb.capacity.free_blocks)
        case "opened":
            return Opened(
                request_id=common.request_id(pb.opened.request_id),
                generation=pb.opened.generation,
                status=common.enum_member(Status, pb.opened.status, field="status"),
                detail=pb.opened.detail,
                cached_tokens=pb.opened.cached_tokens,
                free_blocks=pb.opened.free_blocks,
            )
        case "step_done":
            done = pb.step_done
            return StepDone(
                step_id=done.step_id,
                rows=tuple(_row_done_from_pb(row) for row in done.rows),
                queue_us=done.queue_us,
                forward_us=done.forward_us,
                sample_us=done.sample_us,
                idle_us=done.idle_us,
                batch_tokens=done.batch_tokens,
                batch_rows=done.batch_rows,
                free_blocks=done.free_blocks,
                traceparent=done.traceparent,
            )
        case "preempted":
            return Preempted(
                request_id=common.request_id(pb.preempted.request_id),
                generation=pb.preempted.generation,
                free_blocks=pb.preempted.free_blocks,
            )
        case _:
            raise InvalidRequest("the event is empty or of a kind unknown here", field="event")


def event_to_pb(event: VerifierEvent) -> verifier_pb2.VerifierEvent:
    match event:
        case Capacity():
            return verifier_pb2.VerifierEvent(
                capacity=verifier_pb2.Capacity(
                    max_steps_in_flight=event.max_steps_in_flight, free_blocks=event.free_blocks
                )
            )
        case Opened():
            return verifier_pb2.VerifierEvent(
                opened=verifier_pb2.Opened(
                    request_id=event.request_id,
                    generation=event.generation,
                    status=verifier_pb2.Status.ValueType(event.status),
                    detail=event.detail,
                    cached_tokens=event.cached_tokens,
                    free_blocks=event.free_blocks,
                )
            )
        case StepDone():
            return verifier_pb2.VerifierEvent(
                step_done=verifier_pb2.StepDone(
                    step_id=event.step_id,
                    rows=[_row_done_to_pb(row) for row in event.rows],
                    queue_us=event.queue_us,
                    forward_us=event.forward_us,
                    sample_us=event.sample_us,
                    idle_us=event.idle_us,
                    batch_tokens=event.batch_tokens,
                    batch_rows=event.batch_rows,
                    free_blocks=event.free_blocks,
                    traceparent=event.traceparent,
                )
            )
        case Preempted():
            return verifier_pb2.VerifierEvent(
                preempted=verifier_pb2.Preempted(
                    request_id=event.request_id,
                    generation=event.generation,
                    free_blocks=event.free_blocks,
                )
            )
        case _:
            assert_never(event)


def _open_from_pb(pb: verifier_pb2.OpenRequest) -> OpenRequest:
    id_ = common.request_id(pb.request_id)
    if pb.generation < 1:
        raise InvalidRequest("generation must be at least 1", field="generation")
    if not pb.prompt_ids:
        raise InvalidRequest("prompt_ids must hold at least one id", field="prompt_ids")
    sampling = common.sampling_from_pb(pb.sampling)
    if len(pb.output_ids) >= sampling.max_tokens:
        raise InvalidRequest("output_ids leave no token of max_tokens to sample", field="output_ids")
    return OpenRequest(
        request_id=id_,
        generation=pb.generation,
        order=common.order_from_pb(pb.order, id_),
        prompt_ids=tuple(pb.prompt_ids),
        output_ids=tuple(pb.output_ids),
        sampling=sampling,
        cache_salt=pb.cache_salt,
        traceparent=pb.traceparent,
    )


def _open_to_pb(o: OpenRequest) -> verifier_pb2.OpenRequest:
    return verifier_pb2.OpenRequest(
        request_id=o.request_id,
        generation=o.generation,
        order=common.order_to_pb(o.order),
        prompt_ids=o.prompt_ids,
        output_ids=o.output_ids,
        sampling=common.sampling_to_pb(o.sampling),
        cache_salt=o.cache_salt,
        traceparent=o.traceparent,
    )


def _row_from_pb(pb: verifier_pb2.StepRow) -> StepRow:
    row = StepRow(
        request_id=common.request_id(pb.request_id),
        generation=pb.generation,
        base_len=pb.base_len,
        digest=pb.digest,
        num_computed=pb.num_computed,
        num_tokens=pb.num_tokens,
        draft_ids=tuple(pb.draft_ids),
        draft_probs=common.distributions_from_pb(pb.draft_probs),
        assumes=Assumption(tuple(pb.assumes.draft_ids), pb.assumes.bonus_id)
        if pb.HasField("assumes")
        else None,
    )
    if row.num_tokens < 1 or row.num_computed + row.num_tokens > row.base_len:
        raise InvalidRequest(
            f"num_tokens {row.num_tokens} from {row.num_computed} must stay within base_len {row.base_len}",
            field="num_tokens",
        )
    if row.draft_ids and not row.is_sampling:
        raise InvalidRequest("a prefill chunk carries no drafts", field="draft_ids")
    if len(row.draft_ids) > MAX_DRAFT:
        raise InvalidRequest(f"at most {MAX_DRAFT} drafts a row", field="draft_ids")
    return row


def _row_to_pb(row: StepRow) -> verifier_pb2.StepRow:
    return verifier_pb2.StepRow(
        request_id=row.request_id,
        generation=row.generation,
        base_len=row.base_len,
        digest=row.digest,
        num_computed=row.num_computed,
        num_tokens=row.num_tokens,
        draft_ids=row.draft_ids,
        draft_probs=common.distributions_to_pb(row.draft_probs),
        assumes=verifier_pb2.Assumption(draft_ids=row.assumes.draft_ids, bonus_id=row.assumes.bonus_id)
        if row.assumes
        else None,
    )


def _row_done_from_pb(pb: verifier_pb2.RowDone) -> RowDone:
    return RowDone(
        request_id=common.request_id(pb.request_id),
        generation=pb.generation,
        base_len=pb.base_len,
        status=common.enum_member(Status, pb.status, field="status"),
        detail=pb.detail,
        committed_ids=tuple(pb.committed_ids),
        num_accepted=pb.num_accepted,
        finish_reason=common.enum_member(FinishReason, pb.finish_reason, field="finish_reason")
        if pb.finish_reason
        else None,
        logprobs=common.logprobs_from_pb(pb.logprobs),
        margins=tuple(pb.margins),
        num_computed=pb.num_computed,
        is_replay=pb.is_replay,
    )


def _row_done_to_pb(row: RowDone) -> verifier_pb2.RowDone:
    return verifier_pb2.RowDone(
        request_id=row.request_id,
        generation=row.generation,
        base_len=row.base_len,
        status=verifier_pb2.Status.ValueType(row.status),
        detail=row.detail,
        committed_ids=row.committed_ids,
        num_accepted=row.num_accepted,
        finish_reason=common_pb2.FinishReason.ValueType(row.finish_reason)
        if row.finish_reason
        else common_pb2.FINISH_REASON_UNSPECIFIED,
        logprobs=common.logprobs_to_pb(row.logprobs),
        margins=row.margins,
        num_computed=row.num_computed,
        is_replay=row.is_replay,
    )
