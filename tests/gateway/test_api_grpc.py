"""The public gRPC API as a client sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from specsplit.core.codec.gateway import event_from_pb, generate_request_to_pb
from specsplit.core.errors import NumericError, Overloaded, Unavailable
from specsplit.core.serving import open_channel
from specsplit.core.types import ChatMessage, Delta, Finished, FinishReason, GenerateRequest, Started
from specsplit.gateway.api.grpc_api import GatewayServicer
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.text.tokenizer import Tokenizer
from specsplit.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

TIMEOUT = 20


@pytest.fixture
async def stub(
    generator: Any, byte_tokenizer: Tokenizer, gateway_settings: GatewaySettings
) -> AsyncIterator[gateway_pb2_grpc.GatewayAsyncStub]:
    server = grpc.aio.server()
    servicer = GatewayServicer(generator, byte_tokenizer, gateway_settings)
    gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield gateway_pb2_grpc.GatewayStub(channel)
    await server.stop(grace=None)


def trailing(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    return {key: value for key, value in error.trailing_metadata() if key.startswith("specsplit-")}


async def test_a_conversation(stub: Any, generator: Any) -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    asked = GenerateRequest(
        prompt=(ChatMessage("user", "hi"),), seed=5, stop=("world", "wör"), num_logprobs=1, model="org/tiny"
    )
    call = stub.Generate(
        generate_request_to_pb(asked), timeout=TIMEOUT, metadata=(("traceparent", traceparent),)
    )
    events = [event_from_pb(event) async for event in call]
    request = generator.requests[0]
    assert (request.trace.trace_id, request.trace.is_sampled) == (int("a" * 32, 16), True)
    assert isinstance(events[0], Started)
    assert events[0] == Started(request.request_id, tuple(request.prompt_ids), 5)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == "Hello, "
    assert all(len(delta.ids) == len(delta.logprobs) for delta in deltas)
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].usage.completion_tokens == sum(len(delta.ids) for delta in deltas)
    assert request.sampling.max_tokens == 256 - len(request.prompt_ids)


async def test_text_and_token_prompts(stub: Any, generator: Any, byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("hé", add_special_tokens=True)
    for prompt in ("hé", ids):
        call = stub.Generate(
            generate_request_to_pb(GenerateRequest(prompt=prompt, max_tokens=2)), timeout=TIMEOUT
        )
        events = [event_from_pb(event) async for event in call]
        assert isinstance(events[-1], Finished)
        assert events[-1].finish_reason is FinishReason.LENGTH
    assert [tuple(request.prompt_ids) for request in generator.requests] == [ids, ids]


@pytest.mark.parametrize(
    ("request_pb", "status", "code", "field"),
    [
        (gateway_pb2.GenerateRequest(), "INVALID_ARGUMENT", "invalid_request", "prompt"),
        (gateway_pb2.GenerateRequest(text=""), "INVALID_ARGUMENT", "invalid_request", "prompt"),
        (gateway_pb2.GenerateRequest(text="x", model="y"), "NOT_FOUND", "model_not_found", "model"),
        (
            gateway_pb2.GenerateRequest(text="x" * 256),
            "INVALID_ARGUMENT",
            "context_length_exceeded",
            "prompt",
        ),
        (
            gateway_pb2.GenerateRequest(text="x", max_tokens=0),
            "INVALID_ARGUMENT",
            "invalid_request",
            "max_tokens",
        ),
        (gateway_pb2.GenerateRequest(text="x", top_p=0), "INVALID_ARGUMENT", "invalid_request", "top_p"),
        (gateway_pb2.GenerateRequest(text="x", stop=[""]), "INVALID_ARGUMENT", "invalid_request", "stop"),
        (
            gateway_pb2.GenerateRequest(text="x", verification=common_pb2.VERIFICATION_MODE_REJECTION),
            "INVALID_ARGUMENT",
            "unsupported_parameter",
            "speculation.verification",
        ),
        (
            gateway_pb2.GenerateRequest(text="x", speculation=gateway_pb2.Speculation(k=33)),
            "INVALID_ARGUMENT",
            "invalid_request",
            "speculation.k",
        ),
    ],
)
async def test_refusals(
    stub: Any, generator: Any, request_pb: Any, status: str, code: str, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [event async for event in stub.Generate(request_pb, timeout=TIMEOUT)]
    assert caught.value.code() is grpc.StatusCode[status]
    assert trailing(caught.value) == {"specsplit-code": code, "specsplit-field": field}
    assert generator.requests == []


async def test_a_refusal_that_repeats_a_long_value_arrives(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(gateway_pb2.GenerateRequest(text="x", model="\U0001f600" * 20_000)).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert trailing(caught.value)["specsplit-field"] == "model"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("full"), "RESOURCE_EXHAUSTED"),
        (Unavailable("gone"), "UNAVAILABLE"),
        (NumericError("not finite"), "INTERNAL"),
        (RuntimeError("secret"), "INTERNAL"),
    ],
)
async def test_failures(stub: Any, generator: Any, error: Exception, status: str) -> None:
    generator.fail_after_tokens = (3, error)
    call = stub.Generate(gateway_pb2.GenerateRequest(text="x"), timeout=TIMEOUT)
    assert isinstance(event_from_pb(await call.read()), Started)
    assert isinstance(event_from_pb(await call.read()), Delta)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode[status]
    assert "secret" not in str(caught.value.details())


@pytest.mark.parametrize("moment", ["before the start", "in prefill", "while it decodes"])
async def test_cancelling_the_call_cancels_the_request(stub: Any, generator: Any, moment: str) -> None:
    generator.hold_before_start = moment == "before the start"
    generator.hold_after_tokens = 0 if moment == "in prefill" else 6
    call = stub.Generate(gateway_pb2.GenerateRequest(text="x"), timeout=TIMEOUT)
    if moment == "while it decodes":
        await call.read()
        await call.read()
    await generator.wait_for(num_running=1, num_cancelled=0)
    call.cancel()
    await generator.wait_for(num_running=0, num_cancelled=1)


async def test_a_deadline_cancels_the_request(stub: Any, generator: Any) -> None:
    generator.hold_before_start = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [event async for event in stub.Generate(gateway_pb2.GenerateRequest(text="x"), timeout=0.2)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await generator.wait_for(num_running=0, num_cancelled=1)


async def test_tokens_models_and_stats(stub: Any, generator: Any) -> None:
    tokens = await stub.Tokenize(gateway_pb2.TokenizeRequest(text="hé"), timeout=TIMEOUT)
    assert len(tokens.ids) == 3
    text = await stub.Detokenize(gateway_pb2.DetokenizeRequest(ids=tokens.ids), timeout=TIMEOUT)
    assert text.text == "hé"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Detokenize(gateway_pb2.DetokenizeRequest(ids=[259]), timeout=TIMEOUT)
    assert trailing(caught.value)["specsplit-field"] == "ids"
    models = await stub.Models(gateway_pb2.ModelsRequest(), timeout=TIMEOUT)
    assert [(model.id, model.max_sequence_tokens) for model in models.models] == [("org/tiny", 256)]
    stats = await stub.Stats(common_pb2.StatsRequest(), timeout=TIMEOUT)
    assert {counter.name: counter.value for counter in stats.counters} == {"requests": 0}
    generator.is_ready = False
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Models(gateway_pb2.ModelsRequest(), timeout=TIMEOUT)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
