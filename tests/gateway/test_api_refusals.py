"""Every wrong request is refused before any work, in OpenAI's shape, naming the field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsplit.core.errors import NumericError, Overloaded, SpecsplitError, Unavailable
from specsplit.gateway.api.http_server import HttpServer
from specsplit.gateway.api.openai_http import create_app
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.text.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url, timeout=20) as client:
        yield client


def check_error(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    if code is not None:
        assert error["code"] == code


COMMON_REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "other"}, 404, "model", "model_not_found"),
    ({"model": 5}, 400, "model", "invalid_request"),
    ({"temperature": "1"}, 400, "temperature", "invalid_request"),
    ({"temperature": True}, 400, "temperature", "invalid_request"),
    ({"temperature": -1}, 400, "temperature", "invalid_request"),
    ({"temperature": 101}, 400, "temperature", "invalid_request"),
    ({"top_p": 0}, 400, "top_p", "invalid_request"),
    ({"top_p": 1e-320}, 400, "top_p", "invalid_request"),
    ({"stop": {"k": 1}}, 400, "stop", "invalid_request"),
    ({"top_p": 1.5}, 400, "top_p", "invalid_request"),
    ({"top_k": -1}, 400, "top_k", "invalid_request"),
    ({"top_k": 1.5}, 400, "top_k", "invalid_request"),
    ({"min_p": 2}, 400, "min_p", "invalid_request"),
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_request"),
    ({"max_tokens": "5"}, 400, "max_tokens", "invalid_request"),
    ({"max_tokens": True}, 400, "max_tokens", "invalid_request"),
    ({"min_tokens": 6, "max_tokens": 5}, 400, "min_tokens", "invalid_request"),
    ({"seed": 1.0}, 400, "seed", "invalid_request"),
    ({"seed": 2**64}, 400, "seed", "invalid_request"),
    ({"seed": 10**30}, 400, "seed", "invalid_request"),
    ({"stop": 5}, 400, "stop", "invalid_request"),
    ({"stop": ["a", 5]}, 400, "stop.1", "invalid_request"),
    ({"stop": ""}, 400, "stop", "invalid_request"),
    ({"stop": ["x"] * 17}, 400, "stop", "invalid_request"),
    ({"stop_token_ids": [1, "2"]}, 400, "stop_token_ids.1", "invalid_request"),
    ({"stop_token_ids": [10**6]}, 400, "stop_token_ids", "invalid_request"),
    ({"stream": "yes"}, 400, "stream", "invalid_request"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_request"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x", "invalid_request"),
    ({"priority": 2**40}, 400, "priority", "invalid_request"),
    ({"cache_salt": "x" * 257}, 400, "cache_salt", "invalid_request"),
    ({"ignore_eos": 1}, 400, "ignore_eos", "invalid_request"),
    ({"metadata": 5}, 400, "metadata", "invalid_request"),
    ({"user": 5}, 400, "user", "invalid_request"),
    ({"speculation": 4}, 400, "speculation", "invalid_request"),
    ({"speculation": {"k": 33}}, 400, "speculation.k", "invalid_request"),
    ({"speculation": {"k": -1}}, 400, "speculation.k", "invalid_request"),
    ({"speculation": {"k": "4"}}, 400, "speculation.k", "invalid_request"),
    ({"speculation": {"k": "auto"}}, 400, "speculation.k", "unsupported_parameter"),
    ({"speculation": {"drafter": "x"}}, 400, "speculation.drafter", "invalid_request"),
    ({"speculation": {"verification": "x"}}, 400, "speculation.verification", "invalid_request"),
    (
        {"speculation": {"verification": "rejection"}},
        400,
        "speculation.verification",
        "unsupported_parameter",
    ),
    ({"speculation": {"depth": 1}}, 400, "speculation.depth", "invalid_request"),
    ({"n": 2}, 400, "n", "unsupported_parameter"),
    ({"n": True}, 400, "n", "unsupported_parameter"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias", "unsupported_parameter"),
    ({"frequency_penalty": 0.1}, 400, "frequency_penalty", "unsupported_parameter"),
    ({"presence_penalty": -1}, 400, "presence_penalty", "unsupported_parameter"),
    ({"repetition_penalty": 1.1}, 400, "repetition_penalty", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
    ({"prediction": {"type": "content", "content": "x"}}, 400, "prediction", "unsupported_parameter"),
    ({"service_tier": "flex"}, 400, "service_tier", "unsupported_parameter"),
    ({"temprature": 1}, 400, "temprature", "invalid_request"),
]
CHAT_REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"messages": None}, 400, "messages", "invalid_request"),
    ({"messages": []}, 400, "messages", "invalid_request"),
    ({"messages": "hi"}, 400, "messages", "invalid_request"),
    ({"messages": ["hi"]}, 400, "messages.0", "invalid_request"),
    ({"messages": [{"role": "user"}]}, 400, "messages.0.content", "invalid_request"),
    ({"messages": [{"content": "x"}]}, 400, "messages.0.role", "invalid_request"),
    ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, 400, "messages.1.content", "invalid_request"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, 400, "messages.0.content", "invalid_request"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role", "unsupported_parameter"),
    ({"messages": [{"role": "x", "content": "x"}]}, 400, "messages.0.role", "invalid_request"),
    (
        {"messages": [{"role": "user", "content": "x", "name": "Eve"}]},
        400,
        "messages.0.name",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages.0.content.0.type",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        400,
        "messages.0.content.0.text",
        "invalid_request",
    ),
    (
        {"messages": [{"role": "user", "content": "x" * 256}]},
        400,
        "messages",
        "context_length_exceeded",
    ),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens", "invalid_request"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, 400, "max_completion_tokens", "invalid_request"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "invalid_request"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_request"),
    ({"logprobs": 3}, 400, "logprobs", "invalid_request"),
    ({"tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, 400, "tool_choice", "unsupported_parameter"),
    ({"modalities": ["audio"]}, 400, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "x"}}, 400, "audio", "unsupported_parameter"),
    ({"reasoning_effort": "high"}, 400, "reasoning_effort", "unsupported_parameter"),
    ({"prompt": "x"}, 400, "prompt", "invalid_request"),
]
COMPLETION_REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"prompt": None}, 400, "prompt", "invalid_request"),
    ({"prompt": ""}, 400, "prompt", "invalid_request"),
    ({"prompt": []}, 400, "prompt", "invalid_request"),
    ({"prompt": ["a", ""]}, 400, "prompt", "invalid_request"),
    ({"prompt": ["a", 1]}, 400, "prompt.1", "invalid_request"),
    ({"prompt": [1, "a"]}, 400, "prompt.1", "invalid_request"),
    ({"prompt": [1, True]}, 400, "prompt.1", "invalid_request"),
    ({"prompt": [1, 259]}, 400, "prompt", "invalid_request"),
    ({"prompt": [-1]}, 400, "prompt", "invalid_request"),
    ({"prompt": [[1], []]}, 400, "prompt", "invalid_request"),
    ({"prompt": [[1], ["a"]]}, 400, "prompt.1.0", "invalid_request"),
    ({"prompt": [[1], 2]}, 400, "prompt.1", "invalid_request"),
    ({"prompt": {"text": "x"}}, 400, "prompt", "invalid_request"),
    ({"prompt": "x" * 256}, 400, "prompt", "context_length_exceeded"),
    ({"logprobs": 21}, 400, "logprobs", "invalid_request"),
    ({"logprobs": True}, 400, "logprobs", "invalid_request"),
    ({"echo": True}, 400, "echo", "unsupported_parameter"),
    ({"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
    ({"best_of": 2}, 400, "best_of", "unsupported_parameter"),
    ({"messages": MESSAGES}, 400, "messages", "invalid_request"),
]


async def test_wrong_bodies(client: httpx.AsyncClient, generator: Any) -> None:
    for path, prompt, rows in (
        (CHAT, {"messages": MESSAGES}, COMMON_REFUSED + CHAT_REFUSED),
        (COMPLETIONS, {"prompt": "hi"}, COMMON_REFUSED + COMPLETION_REFUSED),
    ):
        for fields, status, param, code in rows:
            check_error(await client.post(path, json=prompt | fields), status, param, code)
            streamed = prompt | {"stream": True} | fields
            if "stream_options" not in fields:
                check_error(await client.post(path, json=streamed), status, param, code)
    assert generator.requests == []


NOT_OBJECTS = (
    *(b"", b"{", b"null", b"[]", b'"x"', b"\xff", b"[" * 9999),
    *(b'{"prompt":NaN}', b'{"prompt":"\\ud800"}', b'{"prompt":"x"}}'),
)


async def test_more_prompts_than_can_ever_be_admitted(client: httpx.AsyncClient, generator: Any) -> None:
    """Trying again would not help, so it is not answered 429."""
    check_error(
        await client.post(COMPLETIONS, json={"prompt": ["a"] * 1025}), 400, "prompt", "invalid_request"
    )
    assert generator.requests == []


async def test_what_is_not_a_json_object(client: httpx.AsyncClient, generator: Any) -> None:
    for body in NOT_OBJECTS:
        for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
            check_error(await client.post(path, content=body), 400, None, "invalid_request")
    assert generator.requests == []


async def test_missing_prompts(client: httpx.AsyncClient) -> None:
    check_error(await client.post(CHAT, json={}), 400, "messages")
    check_error(await client.post(COMPLETIONS, json={}), 400, "prompt")


async def test_infinity_in_a_number(client: httpx.AsyncClient) -> None:
    body = b'{"prompt":"x","temperature":1e999}'
    check_error(await client.post(COMPLETIONS, content=body), 400, "temperature")


async def test_unknown_paths_methods_and_models(client: httpx.AsyncClient) -> None:
    check_error(await client.post("/v1/embeddings", json={}), 404, None, "not_found")
    check_error(await client.post("/v1/completions/", json={}), 404, None, "not_found")
    response = await client.get(CHAT)
    check_error(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    check_error(await client.get("/v1/models/other"), 404, "model", "model_not_found")


async def test_a_body_too_large(client: httpx.AsyncClient, generator: Any) -> None:
    body = json.dumps({"prompt": "x" * 70_000}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 5000):
            yield body[start : start + 5000]

    check_error(await client.post(COMPLETIONS, content=body), 413, None, "request_too_large")
    check_error(await client.post(COMPLETIONS, content=chunks()), 413, None, "request_too_large")
    assert generator.requests == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_full_server(is_streamed: bool, client: httpx.AsyncClient, generator: Any) -> None:
    generator.fail_before_start = Overloaded("1024 requests are admitted already")
    for prompt in ("hi", ["a", "b"]):
        response = await client.post(COMPLETIONS, json={"prompt": prompt, "stream": is_streamed})
        check_error(response, 429, None, "overloaded")
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
    await generator.wait_for(num_running=0, num_cancelled=0)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Unavailable("no verifier came back"), 503, "unavailable"),
        (NumericError("not finite"), 500, "numeric_error"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
async def test_failures_of_the_server(
    error: Exception,
    status: int,
    code: str,
    is_streamed: bool,
    client: httpx.AsyncClient,
    generator: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator.fail_before_start = error
    response = await client.post(CHAT, json={"messages": MESSAGES, "stream": is_streamed})
    check_error(response, status, None, code)
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    if status == 500:
        assert str(error) in caplog.text  # with its traceback


async def test_not_ready_yet(client: httpx.AsyncClient, generator: Any) -> None:
    assert (await client.get("/ready")).status_code == 200
    generator.is_ready = False
    for response in (
        await client.get("/ready"),
        await client.get("/v1/models"),
        await client.post(CHAT, json={"messages": MESSAGES}),
    ):
        check_error(response, 503, None, "unavailable")
        assert response.headers["retry-after"] == "1"
    assert (await client.get("/health")).status_code == 200


async def test_failures_in_the_middle_of_a_stream(client: httpx.AsyncClient, generator: Any) -> None:
    for error, code in ((SpecsplitError("x"), "internal_error"), (Unavailable("x"), "unavailable")):
        generator.fail_after_tokens = (6, error)
        response = await client.post(CHAT, json={"messages": MESSAGES, "stream": True})
        assert response.status_code == 200
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
        assert "".join(e["choices"][0]["delta"]["content"] for e in events[:-1]) == "Hello,"
        assert events[-1]["error"]["code"] == code


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELD_NAMES = st.sampled_from(
    sorted(
        {name for row in (*COMMON_REFUSED, *CHAT_REFUSED, *COMPLETION_REFUSED) for name in row[0]}
        | {"logprobs", "store", "parallel_tool_calls", "return_token_ids", "tokens", "role", "content"}
    )
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    path=st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]),
    body=st.dictionaries(FIELD_NAMES | st.text(max_size=5), JSON_VALUES, max_size=5),
    is_based_on_a_good_one=st.booleans(),
)
def test_no_body_makes_the_server_fail(
    path: str,
    body: dict[str, Any],
    is_based_on_a_good_one: bool,
    post_directly: Any,
) -> None:
    good: dict[str, Any] = {
        CHAT: {"messages": MESSAGES},
        COMPLETIONS: {"prompt": "hi"},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [1]},
    }[path]
    content = json.dumps(good | body if is_based_on_a_good_one else body).encode()
    response = post_directly(path, content)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        check_error(response, response.status_code, response.json()["error"]["param"])


@pytest.fixture
def post_directly(generator: Any, byte_tokenizer: Tokenizer, gateway_settings: GatewaySettings) -> Any:
    """Posts to the application itself, without a server between."""
    app = create_app(generator, byte_tokenizer, gateway_settings)

    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")
    with asyncio.Runner() as runner:
        yield lambda path, content: runner.run(client.post(path, content=content))
        runner.run(client.aclose())


async def test_a_taken_port_is_refused(http_server: HttpServer, gateway_settings: GatewaySettings) -> None:
    second = HttpServer(http_server._server.config.app, host="127.0.0.1", port=http_server.port)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="in use"):
        await second.start()
    await second.stop()


async def test_an_error_repeats_only_the_beginning_of_a_long_value(client: httpx.AsyncClient) -> None:
    for body in ({"model": "m" * 5_000}, {"k" * 5_000: 1}):
        response = await client.post(COMPLETIONS, json={"prompt": "x"} | body)
        assert response.status_code in (400, 404)
        assert len(response.content) < 2000
