"""OpenAI's API as its own client and plain HTTP see it: shapes, streams, usage, disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from specsplit.gateway.text.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
REPLY = "Hello, wörld 👋!"
NUM_REPLY_TOKENS = len(REPLY.encode())
SPECULATION = {
    "steps": 7,
    "drafted": 6,
    "accepted": 4,
    "accepted_by_position": [2, 1, 1],
    "no_draft_reason": None,
}


@pytest.fixture
async def http(base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url, timeout=20) as client:
        yield client


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of each server-sent event; the last one must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    lines = response.text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_chat(client: openai.AsyncOpenAI, generator: Any) -> None:
    reply = await client.chat.completions.create(model="org/tiny", messages=MESSAGES, seed=3)
    request = generator.requests[0]
    assert reply.id == f"chatcmpl-{request.request_id.hex()}"
    assert (reply.object, reply.model) == ("chat.completion", "org/tiny")
    assert reply.choices[0].message.content == REPLY
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs is None
    assert reply.usage is not None
    usage = reply.usage.model_dump()
    assert usage["prompt_tokens"] == len(request.prompt_ids)
    assert usage["completion_tokens"] == NUM_REPLY_TOKENS
    assert usage["total_tokens"] == NUM_REPLY_TOKENS + len(request.prompt_ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    assert usage["speculation"] == SPECULATION
    assert request.sampling.seed == 3
    assert request.sampling.max_tokens == 256 - len(request.prompt_ids)


async def test_streamed_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="org/tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == REPLY
    assert "\ufffd" not in "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NUM_REPLY_TOKENS


def test_the_synchronous_client(base_url_of_thread: str) -> None:
    with openai.OpenAI(base_url=f"{base_url_of_thread}/v1", api_key="none", max_retries=0) as client:
        reply = client.completions.create(model="org/tiny", prompt="x", max_tokens=5)
        assert reply.choices[0].text == "Hello"
        assert reply.choices[0].finish_reason == "length"
        stream = client.chat.completions.create(model="org/tiny", messages=MESSAGES, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == REPLY
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="other", prompt="x")
        assert caught.value.param == "model"


@pytest.fixture
def base_url_of_thread(generator: Any, byte_tokenizer: Tokenizer, gateway_settings: Any) -> Any:
    """The server in an event loop of its own, for clients that block."""
    from threading import Thread

    from specsplit.gateway.api.http_server import HttpServer
    from specsplit.gateway.api.openai_http import create_app

    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    server = HttpServer(create_app(generator, byte_tokenizer, gateway_settings), host="127.0.0.1", port=0)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    yield f"http://127.0.0.1:{server.port}"
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def test_models_and_tokens(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    assert [model.id async for model in client.models.list()] == ["org/tiny"]
    model = (await http.get("/v1/models/org/tiny")).json()
    assert (model["object"], model["max_model_len"]) == ("model", 256)
    tokens = (await http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert (tokens["count"], tokens["max_model_len"]) == (3, 256)
    assert tokens["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    text = await http.post("/detokenize", json={"model": "org/tiny", "tokens": tokens["tokens"]})
    assert text.json() == {"prompt": "hé"}
    chat = (await http.post("/tokenize", json={"messages": MESSAGES})).json()
    assert chat["tokens"][0] == 257
    assert chat["token_strs"] is None
    for body in ({}, {"prompt": "a", "messages": MESSAGES}):
        assert (await http.post("/tokenize", json=body)).json()["error"]["param"] == "prompt"
    assert (await http.post("/detokenize", json={"tokens": [259]})).json()["error"]["param"] == "tokens"


async def test_fields_that_cannot_change_the_output_are_accepted(http: httpx.AsyncClient) -> None:
    common = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "n": 1,
        "logit_bias": {},
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "prediction": None,
        "seed": None,
        "stop": None,
        "temperature": None,
        "stream": False,
    }
    chat = common | {
        "messages": [{"role": "user", "content": "hi", "name": None}],
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "max_completion_tokens": 4,
        "max_tokens": 4,
        "logprobs": False,
    }
    assert (await http.post(CHAT, json=chat)).json()["choices"][0]["message"]["content"] == "Hell"
    completion = common | {"prompt": "x", "best_of": 1, "echo": False, "suffix": None, "max_tokens": 4}
    assert (await http.post(COMPLETIONS, json=completion)).json()["choices"][0]["text"] == "Hell"


async def test_extensions_reach_the_generator(http: httpx.AsyncClient, generator: Any) -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}],
        "top_k": 3,
        "min_p": 0.1,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "cache_salt": "s",
        "priority": -1,
        "speculation": {"k": 0, "drafter": "ngram", "verification": "coupled"},
        "seed": -1,
        "stop": "zzz",
    }
    response = await http.post(CHAT, json=body, headers={"traceparent": traceparent})
    assert response.status_code == 200, response.text
    request = generator.requests[0]
    assert generator.tokenizer.decode(request.prompt_ids) == "user\na\nb\nassistant\n"
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (3, 0.1, 2)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.seed) == ((5,), True, 2**64 - 1)
    assert (request.cache_salt, request.k, request.stop) == (b"s", 0, ("zzz",))
    assert (request.order.priority, request.trace.trace_id) == (-1, int("a" * 32, 16))


async def test_logprobs_of_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    arguments: Any = {"model": "org/tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    whole = (await client.chat.completions.create(**arguments)).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert b"".join(bytes(token.bytes or ()) for token in whole.content).decode() == REPLY
    assert [len(token.top_logprobs) for token in whole.content] == [2] * NUM_REPLY_TOKENS
    assert whole.content[8].token == "bytes:\\xc3"
    assert whole.content[0].top_logprobs[0].logprob == -0.5
    streamed = [
        token
        async for chunk in await client.chat.completions.create(**arguments, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == whole.content


async def test_logprobs_of_completions(http: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 40}
    logprobs = (await http.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:9] == [*"Hello, w", "bytes:\\xc3"]
    assert logprobs["token_logprobs"] == [-0.5] * NUM_REPLY_TOKENS
    assert logprobs["top_logprobs"][0] == {"H": -0.5}
    # é and the emoji begin where their first bytes do; the exclamation mark is the last character.
    assert logprobs["text_offset"][:12] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10]
    assert logprobs["text_offset"][-1] == len(REPLY) - 1
    events = events_of(await http.post(COMPLETIONS, json=body | {"stream": True}))
    pieces = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    for key, values in logprobs.items():
        assert [value for piece in pieces for value in piece[key]] == values
    only_chosen = await http.post(COMPLETIONS, json=body | {"logprobs": 0})
    assert only_chosen.json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"H": -0.5}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stop_string_cuts_text_ids_logprobs_and_usage_alike(
    is_streamed: bool, http: httpx.AsyncClient, generator: Any
) -> None:
    generator.run_length = 8  # the stop string ends in the middle of a run
    body = {
        "messages": MESSAGES,
        "stop": ["zz", "lo"],
        "logprobs": True,
        "return_token_ids": True,
        "stream": is_streamed,
    }
    ids = list(generator.tokenizer.encode("Hello", add_special_tokens=False))
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
        events = events_of(await http.post(CHAT, json=body))
        choices = [event["choices"][0] for event in events[:-1]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        got_ids = [id_ for choice in choices for id_ in choice.get("token_ids", ())]
        logprobs = [t for choice in choices if choice["logprobs"] for t in choice["logprobs"]["content"]]
        usage, reason = events[-1]["usage"], choices[-1]["finish_reason"]
        prompt_ids = events[0]["prompt_token_ids"]
    else:
        response = (await http.post(CHAT, json=body)).json()
        choice = response["choices"][0]
        text, got_ids = choice["message"]["content"], choice["token_ids"]
        logprobs, reason = choice["logprobs"]["content"], choice["finish_reason"]
        usage, prompt_ids = response["usage"], response["prompt_token_ids"]
    assert (text, got_ids, reason) == ("Hel", ids, "stop")
    assert [token["token"] for token in logprobs] == list("Hello")
    assert usage["completion_tokens"] == 5
    assert prompt_ids == list(generator.requests[0].prompt_ids)


async def test_a_chunk_without_text_still_carries_its_ids(http: httpx.AsyncClient, generator: Any) -> None:
    generator.reply, generator.run_length = "👋", 1
    body = {"messages": MESSAGES, "stream": True, "return_token_ids": True}
    chunks = [event["choices"][0] for event in events_of(await http.post(CHAT, json=body))]
    assert [chunk["delta"].get("content") for chunk in chunks] == ["", "", "", "", "👋", None]
    assert [len(chunk.get("token_ids", ())) for chunk in chunks] == [0, 1, 1, 1, 1, 0]
    del body["return_token_ids"]
    assert len(events_of(await http.post(CHAT, json=body))) == 3


async def test_several_prompts(client: openai.AsyncOpenAI, http: httpx.AsyncClient, generator: Any) -> None:
    reply = await client.completions.create(model="org/tiny", prompt=["a", "bb", "ccc"])
    assert [(choice.index, choice.text) for choice in reply.choices] == [(i, REPLY[:13]) for i in range(3)]
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 48)
    assert reply.usage.model_dump()["speculation"]["accepted_by_position"] == [6, 3, 3]
    assert len({request.request_id for request in generator.requests}) == 3

    body = {"prompt": [[1], [2, 3]], "stream": True, "max_tokens": 5, "return_token_ids": True}
    events = events_of(await http.post(COMPLETIONS, json=body))
    for index, prompt in enumerate(([1], [2, 3])):
        choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert choices[0]["prompt_token_ids"] == prompt
        assert "".join(choice["text"] for choice in choices) == "Hello"
        assert choices[-1]["finish_reason"] == "length"


async def test_several_prompts_run_at_once_and_fail_together(http: httpx.AsyncClient, generator: Any) -> None:
    generator.hold_after_tokens = 3  # each further token waits for ever
    generator.fail_before_start = None
    sending = asyncio.ensure_future(http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]}))
    await generator.wait_for(num_running=3, num_cancelled=0)
    sending.cancel()
    await generator.wait_for(num_running=0, num_cancelled=3)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("moment", ["before the start", "in prefill", "while it decodes"])
async def test_a_client_that_leaves_cancels_its_requests(
    is_streamed: bool, prompt: Any, moment: str, http: httpx.AsyncClient, generator: Any
) -> None:
    generator.hold_before_start = moment == "before the start"
    generator.hold_after_tokens = 0 if moment == "in prefill" else 6
    num_requests = len(prompt)
    body = {"prompt": prompt, "stream": is_streamed, "return_token_ids": True}
    request = http.build_request("POST", COMPLETIONS, json=body)
    sending = asyncio.ensure_future(http.send(request, stream=True))
    await generator.wait_for(num_running=num_requests, num_cancelled=0)
    if is_streamed and not generator.hold_before_start:
        response = await sending
        if moment == "while it decodes":
            await anext(response.aiter_bytes())
        await response.aclose()
    else:
        sending.cancel()
    await generator.wait_for(num_running=0, num_cancelled=num_requests)


async def test_stopping_the_server_ends_what_runs(
    http: httpx.AsyncClient, http_server: Any, generator: Any
) -> None:
    generator.hold_before_start = True
    sending = asyncio.ensure_future(http.post(COMPLETIONS, json={"prompt": "a"}))
    await generator.wait_for(num_running=1, num_cancelled=0)
    await http_server.stop(grace_seconds=0)
    await generator.wait_for(num_running=0, num_cancelled=1)
    with pytest.raises(httpx.HTTPError):
        (await sending).raise_for_status()


async def test_a_client_that_leaves_while_it_sends(base_url: str, http: httpx.AsyncClient) -> None:
    _, port = base_url.rsplit(":", 1)
    _, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await http.get("/health")).status_code == 200
