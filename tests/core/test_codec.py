"""The codec: what goes out comes back equal, and what the contract forbids is refused by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsplit.core import types as t
from specsplit.core.codec import common, drafter, gateway, verifier
from specsplit.core.errors import InvalidRequest
from specsplit.v1 import common_pb2, drafter_pb2, gateway_pb2, verifier_pb2

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
F32 = st.floats(width=32, allow_nan=False)
COUNT = st.integers(0, 1000)
REQUEST_IDS = st.binary(min_size=16, max_size=16)
IDS = st.lists(U32, max_size=6).map(tuple)
TEXT = st.text(max_size=8)


def many(strategy: st.SearchStrategy[Any], **limits: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=limits.get("max_size", 3)).map(tuple)


MARGINS = many(F32)
LOGPROBS = many(st.builds(t.TokenLogprobs, F32, IDS, MARGINS))
DISTRIBUTIONS = many(st.builds(t.SparseDistribution, IDS, MARGINS))


@st.composite
def samplings(draw: st.DrawFn) -> t.SamplingParams:
    max_tokens = draw(st.integers(1, 2**32 - 1))
    return t.SamplingParams(
        max_tokens=max_tokens,
        seed=draw(U64),
        temperature=draw(st.floats(0, t.MAX_TEMPERATURE)),
        top_k=draw(st.integers(0, 2**31 - 1)),
        top_p=draw(st.floats(t.MIN_TOP_P, 1)),
        min_p=draw(st.floats(0, 1)),
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(IDS),
        ignore_eos=draw(st.booleans()),
        verification=draw(st.sampled_from(t.VerificationMode)),
        num_logprobs=draw(st.none() | st.integers(0, t.MAX_LOGPROBS)),
        report_margins=draw(st.booleans()),
    )


@st.composite
def opens(draw: st.DrawFn) -> t.OpenRequest:
    request_id = draw(REQUEST_IDS)
    sampling = draw(samplings())
    return t.OpenRequest(
        request_id=request_id,
        generation=draw(st.integers(1, 2**32 - 1)),
        order=t.Order(draw(st.integers(-(2**31), 2**31 - 1)), draw(U64), request_id),
        prompt_ids=(draw(U32), *draw(IDS)),
        output_ids=draw(IDS)[: sampling.max_tokens - 1],
        sampling=sampling,
        cache_salt=draw(st.binary(max_size=8)),
        traceparent=draw(TEXT),
    )


@st.composite
def step_rows(draw: st.DrawFn) -> t.StepRow:
    num_computed, num_tokens = draw(COUNT), draw(st.integers(1, 1000))
    after = draw(st.just(0) | COUNT)
    return t.StepRow(
        request_id=draw(REQUEST_IDS),
        generation=draw(U32),
        base_len=num_computed + num_tokens + after,
        digest=draw(U64),
        num_computed=num_computed,
        num_tokens=num_tokens,
        draft_ids=() if after else draw(IDS),
        draft_probs=draw(DISTRIBUTIONS),
        assumes=draw(st.none() | st.builds(t.Assumption, IDS, U32)),
    )


@st.composite
def draft_rows(draw: st.DrawFn) -> t.DraftRow:
    new_ids = draw(IDS)
    return t.DraftRow(
        request_id=draw(REQUEST_IDS),
        generation=draw(U32),
        base_len=len(new_ids) + draw(COUNT),
        digest=draw(U64),
        new_ids=new_ids,
        max_draft=draw(st.integers(0, t.MAX_DRAFT)),
        prompt_len=draw(U32),
        sampling=draw(st.none() | samplings()),
    )


def built(kind: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **fields)


VERIFIER_COMMANDS = st.one_of(
    opens(),
    built(t.Step, step_id=U64, rows=many(step_rows())),
    built(t.CloseRequest, request_id=REQUEST_IDS, generation=U32),
)
ROWS_DONE = built(
    t.RowDone,
    request_id=REQUEST_IDS,
    generation=U32,
    base_len=U32,
    status=st.sampled_from(t.Status),
    num_computed=U32,
    committed_ids=IDS,
    num_accepted=U32,
    finish_reason=st.none() | st.sampled_from(t.FinishReason),
    logprobs=LOGPROBS,
    margins=MARGINS,
    is_replay=st.booleans(),
    detail=TEXT,
)
MICROSECONDS = dict.fromkeys(("queue_us", "forward_us", "sample_us", "idle_us"), U32)
VERIFIER_EVENTS = st.one_of(
    built(t.Capacity, max_steps_in_flight=U32, free_blocks=U32),
    built(
        t.Opened,
        request_id=REQUEST_IDS,
        generation=U32,
        status=st.sampled_from(t.Status),
        free_blocks=U32,
        cached_tokens=U32,
        detail=TEXT,
    ),
    built(
        t.StepDone,
        step_id=U64,
        rows=many(ROWS_DONE),
        batch_tokens=U32,
        batch_rows=U32,
        free_blocks=U32,
        traceparent=TEXT,
        **MICROSECONDS,
    ),
    built(t.Preempted, request_id=REQUEST_IDS, generation=U32, free_blocks=U32),
)
DRAFT_COMMANDS = st.one_of(
    built(t.DraftBatch, batch_id=U64, rows=many(draft_rows())),
    built(t.CloseDraft, request_id=REQUEST_IDS),
)
DRAFT_ROWS_DONE = built(
    t.DraftRowDone,
    request_id=REQUEST_IDS,
    generation=U32,
    base_len=U32,
    status=st.sampled_from(t.DraftStatus),
    draft_ids=IDS,
    confidence=MARGINS,
    draft_probs=DISTRIBUTIONS,
    match_len=U32,
    detail=TEXT,
)
USAGES = built(
    t.Usage,
    **dict.fromkeys(
        ("prompt_tokens", "completion_tokens", "cached_tokens", "steps", "drafted", "accepted"), U32
    ),
    accepted_by_position=IDS,
    no_draft_reason=st.none() | st.sampled_from(t.NoDraftReason),
)
GENERATE_EVENTS = st.one_of(
    built(t.Started, request_id=REQUEST_IDS, prompt_ids=IDS, seed=U64),
    built(t.Delta, text=TEXT, ids=IDS, logprobs=LOGPROBS, margins=MARGINS),
    built(t.Finished, finish_reason=st.sampled_from(t.FinishReason), usage=USAGES),
)
DOUBLES = st.floats(allow_nan=False)
GENERATE_REQUESTS = built(
    t.GenerateRequest,
    prompt=TEXT | IDS | st.lists(st.builds(t.ChatMessage, TEXT, TEXT), min_size=1, max_size=3).map(tuple),
    model=TEXT,
    **dict.fromkeys(("temperature", "top_p", "min_p"), st.none() | DOUBLES),
    **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "num_logprobs"), st.none() | U32),
    seed=st.none() | U64,
    stop=many(TEXT),
    stop_token_ids=IDS,
    ignore_eos=st.booleans(),
    report_margins=st.booleans(),
    cache_salt=TEXT,
    priority=st.integers(-(2**31), 2**31 - 1),
    speculation=st.builds(t.Speculation, k=st.none() | U32, drafter=TEXT),
    verification=st.sampled_from(t.VerificationMode),
)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(VERIFIER_COMMANDS)
def test_verifier_commands_round_trip(command: t.VerifierCommand) -> None:
    assert verifier.command_from_pb(over_the_wire(verifier.command_to_pb(command))) == command


@given(VERIFIER_EVENTS)
def test_verifier_events_round_trip(event: t.VerifierEvent) -> None:
    assert verifier.event_from_pb(over_the_wire(verifier.event_to_pb(event))) == event


@given(DRAFT_COMMANDS)
def test_draft_commands_round_trip(command: t.DraftCommand) -> None:
    assert drafter.command_from_pb(over_the_wire(drafter.command_to_pb(command))) == command


@given(built(t.DraftBatchDone, batch_id=U64, rows=many(DRAFT_ROWS_DONE), draft_us=U32, traceparent=TEXT))
def test_draft_answers_round_trip(done: t.DraftBatchDone) -> None:
    assert drafter.batch_done_from_pb(over_the_wire(drafter.batch_done_to_pb(done))) == done


@given(GENERATE_REQUESTS)
def test_generate_requests_round_trip(request: t.GenerateRequest) -> None:
    pb = over_the_wire(gateway.generate_request_to_pb(request))
    assert gateway.generate_request_from_pb(pb) == request


@given(GENERATE_EVENTS)
def test_generate_events_round_trip(event: t.GenerateEvent) -> None:
    assert gateway.event_from_pb(over_the_wire(gateway.event_to_pb(event))) == event


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(-(2**63), 2**63 - 1)))
def test_stats_round_trip(counters: dict[str, int]) -> None:
    assert common.stats_from_pb(over_the_wire(common.stats_to_pb(counters))) == counters


@given(
    built(
        t.VerifierDescription,
        **dict.fromkeys(("model", "revision", "dtype", "numerics", "tokenizer_digest"), TEXT),
        **dict.fromkeys(("vocab_size", "max_sequence_tokens", "block_size", "num_blocks"), U32),
        **dict.fromkeys(
            ("max_step_tokens", "max_step_rows", "tensor_parallel", "pipeline_parallel", "wire_version"), U32
        ),
        **dict.fromkeys(("incarnation", "registry_namespace"), st.binary(max_size=16)),
        eos_token_ids=IDS,
    ),
    built(
        t.DrafterDescription,
        **dict.fromkeys(("name", "tokenizer_digest"), TEXT),
        **dict.fromkeys(("max_draft", "wire_version"), U32),
        incarnation=st.binary(max_size=16),
    ),
)
def test_descriptions_round_trip(v: t.VerifierDescription, d: t.DrafterDescription) -> None:
    assert verifier.description_from_pb(over_the_wire(verifier.description_to_pb(v))) == v
    assert drafter.description_from_pb(over_the_wire(drafter.description_to_pb(d))) == d


SAMPLING = t.SamplingParams(max_tokens=5, seed=1)
OPEN = t.OpenRequest(b"r" * 16, 1, t.Order(0, 1, b"r" * 16), (1, 2), (), SAMPLING)
STEP_ROW = t.StepRow(b"r" * 16, 1, base_len=10, digest=1, num_computed=8, num_tokens=2, draft_ids=(1,))
DRAFT_ROW = t.DraftRow(b"r" * 16, 1, base_len=3, digest=1, new_ids=(1, 2), max_draft=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1},
        {"temperature": 100.5},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 2**31},
        {"top_p": 0.0},
        {"top_p": 1e-320},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"min_p": -0.5},
        {"min_p": 1.5},
        {"min_p": float("nan")},
        {"max_tokens": 0},
        {"min_tokens": 6},
        {"num_logprobs": 21},
    ],
    ids=str,
)
def test_sampling_out_of_range_names_the_field(changes: dict[str, float]) -> None:
    wrong = replace(SAMPLING, **changes)  # type: ignore[arg-type]
    (field,) = changes
    for refuse in (
        lambda: common.check_sampling(wrong),
        lambda: verifier.command_from_pb(verifier.command_to_pb(replace(OPEN, sampling=wrong))),
        lambda: drafter.command_from_pb(
            drafter.command_to_pb(t.DraftBatch(1, (replace(DRAFT_ROW, sampling=wrong),)))
        ),
    ):
        with pytest.raises(InvalidRequest) as caught:
            refuse()
        assert caught.value.field == field
        assert field in caught.value.message


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_no_message_can_carry_is_refused_by_the_check(seed: int) -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        common.check_sampling(replace(SAMPLING, seed=seed))


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (replace(OPEN, request_id=b"short"), "request_id"),
        (replace(OPEN, generation=0), "generation"),
        (replace(OPEN, prompt_ids=()), "prompt_ids"),
        (replace(OPEN, output_ids=(1, 2, 3, 4, 5)), "output_ids"),
        (t.CloseRequest(b"", 1), "request_id"),
        (t.Step(1, (replace(STEP_ROW, request_id=b"r" * 17),)), "request_id"),
        (t.Step(1, (replace(STEP_ROW, num_tokens=0),)), "num_tokens"),
        (t.Step(1, (replace(STEP_ROW, num_tokens=3),)), "num_tokens"),
        (t.Step(1, (replace(STEP_ROW, num_tokens=1),)), "draft_ids"),
        (t.Step(1, (replace(STEP_ROW, draft_ids=(1,) * 33),)), "draft_ids"),
    ],
)
def test_verifier_commands_out_of_range_name_the_field(command: t.VerifierCommand, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        verifier.command_from_pb(verifier.command_to_pb(command))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (t.CloseDraft(b"short"), "request_id"),
        (t.DraftBatch(1, (replace(DRAFT_ROW, request_id=b""),)), "request_id"),
        (t.DraftBatch(1, (replace(DRAFT_ROW, base_len=1),)), "new_ids"),
        (t.DraftBatch(1, (replace(DRAFT_ROW, max_draft=33),)), "max_draft"),
    ],
)
def test_draft_commands_out_of_range_name_the_field(command: t.DraftCommand, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        drafter.command_from_pb(drafter.command_to_pb(command))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("decode", "pb", "field"),
    [
        (verifier.command_from_pb, verifier_pb2.VerifierCommand(), "command"),
        (verifier.event_from_pb, verifier_pb2.VerifierEvent(), "event"),
        (drafter.command_from_pb, drafter_pb2.DraftCommand(), "command"),
        (gateway.event_from_pb, gateway_pb2.GenerateEvent(), "event"),
        (gateway.generate_request_from_pb, gateway_pb2.GenerateRequest(), "prompt"),
    ],
)
def test_empty_messages_are_refused(decode: Any, pb: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(pb)
    assert caught.value.field == field


@pytest.mark.parametrize("number", [0, 99])
def test_unknown_enum_numbers_are_refused_by_field(number: int) -> None:
    opened = verifier_pb2.Opened(request_id=b"r" * 16)
    opened.status = number  # type: ignore[assignment]
    row = verifier_pb2.RowDone(request_id=b"r" * 16)
    row.status = number  # type: ignore[assignment]
    draft = drafter_pb2.DraftRowDone(request_id=b"r" * 16)
    draft.status = number  # type: ignore[assignment]
    finished = gateway_pb2.Finished()
    finished.finish_reason = number  # type: ignore[assignment]
    for field, refuse in (
        ("status", lambda: verifier.event_from_pb(verifier_pb2.VerifierEvent(opened=opened))),
        (
            "status",
            lambda: verifier.event_from_pb(
                verifier_pb2.VerifierEvent(step_done=verifier_pb2.StepDone(rows=[row]))
            ),
        ),
        ("status", lambda: drafter.batch_done_from_pb(drafter_pb2.DraftBatchDone(rows=[draft]))),
        ("finish_reason", lambda: gateway.event_from_pb(gateway_pb2.GenerateEvent(finished=finished))),
    ):
        with pytest.raises(InvalidRequest) as caught:
            refuse()
        assert caught.value.field == field


def test_an_unset_verification_mode_is_coupled_and_an_unknown_one_refused() -> None:
    assert common.verification_mode(common_pb2.VERIFICATION_MODE_UNSPECIFIED) is t.VerificationMode.COUPLED
    with pytest.raises(InvalidRequest, match="verification"):
        common.verification_mode(7)


def test_the_enums_of_types_and_wire_agree() -> None:
    for kind, wire, prefix in (
        (t.Status, verifier_pb2.Status, "STATUS_"),
        (t.DraftStatus, drafter_pb2.DraftStatus, "DRAFT_STATUS_"),
        (t.FinishReason, common_pb2.FinishReason, "FINISH_REASON_"),
        (t.NoDraftReason, gateway_pb2.NoDraftReason, "NO_DRAFT_REASON_"),
        (t.VerificationMode, common_pb2.VerificationMode, "VERIFICATION_MODE_"),
    ):
        members = {prefix + member.name: member.value for member in kind}  # type: ignore[attr-defined]
        assert {**members, f"{prefix}UNSPECIFIED": 0} == dict(wire.items())  # type: ignore[attr-defined]
