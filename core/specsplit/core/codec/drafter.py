"""Conversion of the drafter's messages. Knows nothing of what they do."""

from __future__ import annotations

from specsplit.core.codec import common
from specsplit.core.errors import InvalidRequest
from specsplit.core.types import (
    MAX_DRAFT,
    CloseDraft,
    DraftBatch,
    DraftBatchDone,
    DraftCommand,
    DrafterDescription,
    DraftRow,
    DraftRowDone,
    DraftStatus,
)
from specsplit.v1 import drafter_pb2


def description_from_pb(pb: drafter_pb2.DrafterDescription) -> DrafterDescription:
    return DrafterDescription(
        wire_version=pb.wire_version,
        name=pb.name,
        max_draft=pb.max_draft,
        tokenizer_digest=pb.tokenizer_digest,
        incarnation=pb.incarnation,
    )


def description_to_pb(d: DrafterDescription) -> drafter_pb2.DrafterDescription:
    return drafter_pb2.DrafterDescription(
        wire_version=d.wire_version,
        name=d.name,
        max_draft=d.max_draft,
        tokenizer_digest=d.tokenizer_digest,
        incarnation=d.incarnation,
    )


def command_from_pb(pb: drafter_pb2.DraftCommand) -> DraftCommand:
    """Raises InvalidRequest naming the field; a command that fails here has no effect."""
    match pb.WhichOneof("command"):
        case "batch":
            return DraftBatch(pb.batch.batch_id, tuple(_row_from_pb(row) for row in pb.batch.rows))
        case "close":
            return CloseDraft(common.request_id(pb.close.request_id))
        case _:
            raise InvalidRequest("the command is empty or of a kind unknown here", field="command")


def command_to_pb(command: DraftCommand) -> drafter_pb2.DraftCommand:
    match command:
        case DraftBatch():
            return drafter_pb2.DraftCommand(
                batch=drafter_pb2.DraftBatch(
                    batch_id=command.batch_id, rows=[_row_to_pb(row) for row in command.rows]
                )
            )
        case CloseDraft():
            return drafter_pb2.DraftCommand(close=drafter_pb2.CloseDraft(request_id=command.request_id))


def batch_done_from_pb(pb: drafter_pb2.DraftBatchDone) -> DraftBatchDone:
    return DraftBatchDone(
        pb.batch_id, tuple(_row_done_from_pb(row) for row in pb.rows), pb.draft_us, pb.traceparent
    )


def batch_done_to_pb(done: DraftBatchDone) -> drafter_pb2.DraftBatchDone:
    return drafter_pb2.DraftBatchDone(
        batch_id=done.batch_id,
        rows=[_row_done_to_pb(row) for row in done.rows],
        draft_us=done.draft_us,
        traceparent=done.traceparent,
    )


def _row_from_pb(pb: drafter_pb2.DraftRow) -> DraftRow:
    if len(pb.new_ids) > pb.base_len:
        raise InvalidRequest(f"{len(pb.new_ids)} new ids do not fit base_len {pb.base_len}", field="new_ids")
    if pb.max_draft > MAX_DRAFT:
        raise InvalidRequest(f"at most {MAX_DRAFT}, not {pb.max_draft}", field="max_draft")
    return DraftRow(
        request_id=common.request_id(pb.request_id),
        generation=pb.generation,
        base_len=pb.base_len,
        digest=pb.digest,
        new_ids=tuple(pb.new_ids),
        max_draft=pb.max_draft,
        prompt_len=pb.prompt_len,
        sampling=common.sampling_from_pb(pb.sampling) if pb.HasField("sampling") else None,
        traceparent=pb.traceparent,
    )


def _row_to_pb(row: DraftRow) -> drafter_pb2.DraftRow:
    return drafter_pb2.DraftRow(
        request_id=row.request_id,
        generation=row.generation,
        base_len=row.base_len,
        digest=row.digest,
        new_ids=row.new_ids,
        max_draft=row.max_draft,
        prompt_len=row.prompt_len,
        sampling=common.sampling_to_pb(row.sampling) if row.sampling else None,
        traceparent=row.traceparent,
    )


def _row_done_from_pb(pb: drafter_pb2.DraftRowDone) -> DraftRowDone:
    return DraftRowDone(
        request_id=common.request_id(pb.request_id),
        generation=pb.generation,
        base_len=pb.base_len,
        status=common.enum_member(DraftStatus, pb.status, field="status"),
        detail=pb.detail,
        draft_ids=tuple(pb.draft_ids),
        confidence=tuple(pb.confidence),
        draft_probs=common.distributions_from_pb(pb.draft_probs),
        match_len=pb.match_len,
    )


def _row_done_to_pb(row: DraftRowDone) -> drafter_pb2.DraftRowDone:
    return drafter_pb2.DraftRowDone(
        request_id=row.request_id,
        generation=row.generation,
        base_len=row.base_len,
        status=drafter_pb2.DraftStatus.ValueType(row.status),
        detail=row.detail,
        draft_ids=row.draft_ids,
        confidence=row.confidence,
        draft_probs=common.distributions_to_pb(row.draft_probs),
        match_len=row.match_len,
    )
