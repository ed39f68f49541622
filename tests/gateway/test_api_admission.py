"""What is admitted and as what, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from specsplit.core.errors import InvalidRequest, ModelNotFound, PromptTooLong, UnsupportedParameter
from specsplit.core.types import ChatMessage, GenerateRequest, ModelCard, Speculation, VerificationMode
from specsplit.gateway.api.admission import admit
from specsplit.gateway.request import AdmittedRequest, Limits
from specsplit.gateway.text.tokenizer import Tokenizer

LIMITS = Limits(vocab_size=259, max_sequence_tokens=64)


def admitted(
    tokenizer: Tokenizer,
    *,
    default_max_tokens: int | None = None,
    traceparent: str = "",
    trace_ratio: float = 0.0,
    **fields: Any,
) -> AdmittedRequest:
    return admit(
        GenerateRequest(**{"prompt": "abc"} | fields),
        tokenizer=tokenizer,
        limits=LIMITS,
        model=ModelCard("tiny", LIMITS.max_sequence_tokens),
        default_k=4,
        arrival_us=123,
        default_max_tokens=default_max_tokens,
        traceparent=traceparent,
        trace_ratio=trace_ratio,
    )


def test_defaults(byte_tokenizer: Tokenizer) -> None:
    request = admitted(byte_tokenizer)
    assert request.prompt_ids == byte_tokenizer.encode("abc", add_special_tokens=True)
    assert request.sampling.max_tokens == 61
    assert (request.sampling.temperature, request.sampling.top_p, request.k) == (1.0, 1.0, 4)
    assert (request.order.priority, request.order.arrival_us) == (0, 123)
    assert request.order.request_id == request.request_id
    assert request.sampling.seed != admitted(byte_tokenizer).sampling.seed
    assert admitted(byte_tokenizer, default_max_tokens=16).sampling.max_tokens == 16


def test_values_are_taken_over(byte_tokenizer: Tokenizer) -> None:
    request = admitted(
        byte_tokenizer,
        model="tiny",
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        seed=7,
        max_tokens=9,
        min_tokens=2,
        stop=("x",),
        stop_token_ids=(3,),
        ignore_eos=True,
        num_logprobs=2,
        report_margins=True,
        cache_salt="é",
        priority=-3,
        speculation=Speculation(0, "ngram"),
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 5, 0.5, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (7, 9, 2)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((3,), True)
    assert (sampling.num_logprobs, sampling.report_margins) == (2, True)
    assert (request.stop, request.k, request.cache_salt) == (("x",), 0, "é".encode())
    assert request.order.priority == -3


@pytest.mark.parametrize(("seed", "key"), [(0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1,) * 2])
def test_seeds_are_64_bits(byte_tokenizer: Tokenizer, seed: int, key: int) -> None:
    assert admitted(byte_tokenizer, seed=seed).sampling.seed == key


def test_the_context_bounds_the_output(byte_tokenizer: Tokenizer) -> None:
    assert admitted(byte_tokenizer, prompt="a" * 63, max_tokens=10**9).sampling.max_tokens == 1
    assert admitted(byte_tokenizer, prompt=(1,) * 60).sampling.max_tokens == 4
    with pytest.raises(PromptTooLong) as caught:
        admitted(byte_tokenizer, prompt="a" * 64)
    assert caught.value.field == "prompt"
    with pytest.raises(PromptTooLong) as caught:
        admitted(byte_tokenizer, prompt=(ChatMessage("user", "a" * 64),))
    assert caught.value.field == "messages"


def test_developers_speak_as_the_system(byte_tokenizer: Tokenizer) -> None:
    messages = (ChatMessage("developer", "x"), ChatMessage("user", "y"))
    assert admitted(byte_tokenizer, prompt=messages).prompt_ids == byte_tokenizer.encode_chat(
        [ChatMessage("system", "x"), ChatMessage("user", "y")]
    )


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"model": "other"}, ModelNotFound, "model"),
        ({"prompt": ""}, InvalidRequest, "prompt"),
        ({"prompt": ()}, InvalidRequest, "prompt"),
        ({"prompt": (259,)}, InvalidRequest, "prompt"),
        ({"prompt": (-1,)}, InvalidRequest, "prompt"),
        ({"prompt": (ChatMessage("tool", "x"),)}, UnsupportedParameter, "messages.0.role"),
        ({"prompt": (ChatMessage("king", "x"),)}, InvalidRequest, "messages.0.role"),
        ({"temperature": -0.1}, InvalidRequest, "temperature"),
        ({"temperature": float("nan")}, InvalidRequest, "temperature"),
        ({"top_p": 0.0}, InvalidRequest, "top_p"),
        ({"min_p": 1.1}, InvalidRequest, "min_p"),
        ({"top_k": -1}, InvalidRequest, "top_k"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, InvalidRequest, "min_tokens"),
        ({"min_tokens": 62}, InvalidRequest, "min_tokens"),
        ({"min_tokens": -1}, InvalidRequest, "min_tokens"),
        ({"num_logprobs": 21}, InvalidRequest, "num_logprobs"),
        ({"seed": 2**64}, InvalidRequest, "seed"),
        ({"seed": -(2**63) - 1}, InvalidRequest, "seed"),
        ({"stop": ("",)}, InvalidRequest, "stop"),
        ({"stop": ("x",) * 17}, InvalidRequest, "stop"),
        ({"stop": ("x" * 1025,)}, InvalidRequest, "stop"),
        ({"stop_token_ids": (259,)}, InvalidRequest, "stop_token_ids"),
        ({"cache_salt": "é" * 129}, InvalidRequest, "cache_salt"),
        ({"priority": 2**31}, InvalidRequest, "priority"),
        ({"speculation": Speculation(33)}, InvalidRequest, "speculation.k"),
        ({"speculation": Speculation(-1)}, InvalidRequest, "speculation.k"),
        ({"speculation": Speculation(1, "eagle")}, InvalidRequest, "speculation.drafter"),
        ({"verification": VerificationMode.REJECTION}, UnsupportedParameter, "speculation.verification"),
    ],
)
def test_refusals_name_the_field(
    byte_tokenizer: Tokenizer, fields: dict[str, Any], error: type[Exception], field: str
) -> None:
    with pytest.raises(error) as caught:
        admitted(byte_tokenizer, **fields)
    assert caught.value.field == field  # type: ignore[attr-defined]


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_callers_trace_is_continued_by_its_own_choice(byte_tokenizer: Tokenizer, flags: str) -> None:
    trace = admitted(byte_tokenizer, traceparent=f"00-{'a' * 32}-{'b' * 16}-{flags}", trace_ratio=0.5).trace
    assert (trace.trace_id, trace.parent_span_id) == (int("a" * 32, 16), int("b" * 16, 16))
    assert trace.is_sampled == (flags == "01")


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_request_without_a_trace_gets_its_own(byte_tokenizer: Tokenizer, ratio: float) -> None:
    traces = [admitted(byte_tokenizer, traceparent="00-xyz", trace_ratio=ratio).trace for _ in range(2)]
    assert len({trace.trace_id for trace in traces} | {trace.span_id for trace in traces}) == 4
    assert all(trace.parent_span_id is None and trace.is_sampled == (ratio == 1) for trace in traces)
