"""What users run against a stack: the official client, plain HTTP, and the terminal command."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import httpx
import openai
import pytest
from stack_harness import Client, Stack, assert_same_output

from specsplit.core.types import ChatMessage, GenerateRequest, Speculation

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MESSAGES = [{"role": "user", "content": "Say it again: one two three one two three one two"}]


@pytest.fixture
def model(tiny_stack: Stack) -> str:
    return str(httpx.get(f"{tiny_stack.http}/v1/models").json()["data"][0]["id"])


def test_the_official_client_streamed_and_whole(tiny_stack: Stack, model: str) -> None:
    client = openai.OpenAI(base_url=f"{tiny_stack.http}/v1", api_key="none", max_retries=0)
    with client:
        params = {"model": model, "messages": MESSAGES, "max_tokens": 40, "temperature": 0.7, "seed": 11}
        whole = client.chat.completions.create(**params, logprobs=True, top_logprobs=2)  # type: ignore[call-overload]
        chunks = list(
            client.chat.completions.create(**params, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert (
        chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    )
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert all(len(t.top_logprobs) == 2 for t in whole.choices[0].logprobs.content)


async def test_http_and_grpc_give_the_same_tokens(tiny_stack: Stack, model: str) -> None:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 40, "temperature": 0.9, "top_k": 20}
    body |= {"seed": 3, "return_token_ids": True, "speculation": {"k": 0}}
    async with httpx.AsyncClient(base_url=tiny_stack.http) as http, Client(tiny_stack) as client:
        reply = (await http.post("/v1/chat/completions", json=body)).json()
        got = await client.generate(
            GenerateRequest(
                prompt=tuple(ChatMessage(**m) for m in MESSAGES),
                max_tokens=40,
                temperature=0.9,
                top_k=20,
                seed=3,
                speculation=Speculation(k=8),
                report_margins=True,
            )
        )
    assert reply["choices"][0]["token_ids"] == got.ids
    assert reply["choices"][0]["message"]["content"] == got.text


async def test_several_prompts_stream_side_by_side(tiny_stack: Stack, model: str) -> None:
    prompts = ["abc", "Hello", [1, 2, 3]]
    body = {"model": model, "prompt": ["abc", "Hello"], "max_tokens": 12, "temperature": 0}
    async with httpx.AsyncClient(base_url=tiny_stack.http) as http:
        together = (await http.post("/v1/completions", json=body)).json()["choices"]
        for choice, prompt in zip(together, prompts, strict=False):
            one = (await http.post("/v1/completions", json={**body, "prompt": prompt})).json()["choices"][0]
            assert one["text"] == choice["text"]
        texts = {0: "", 1: ""}
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] += choice["text"]
    assert [texts[0], texts[1]] == [choice["text"] for choice in together]


async def test_a_client_that_hangs_up_frees_everything(tiny_stack: Stack, model: str) -> None:
    body = {"model": model, "prompt": "abc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=tiny_stack.http) as http:
        for stream in (True, False):
            post = asyncio.ensure_future(
                http.post("/v1/completions", json={**body, "stream": stream}, timeout=None)
            )
            await asyncio.to_thread(
                tiny_stack.wait_stats, "gateway", lambda s: s["requests"] == 1, "a request"
            )
            post.cancel()
            await asyncio.to_thread(tiny_stack.wait_stats, "gateway", lambda s: s["requests"] == 0, "its end")
            await asyncio.to_thread(
                tiny_stack.wait_stats, "verifier", lambda s: s["open_requests"] == 0, "its end there"
            )


def test_generate_ends_with_what_it_used(tiny_stack: Stack) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "specsplit.cli", "generate", "Hello Hello Hello"),
            *("--address", tiny_stack.address("gateway"), "--max-tokens", "20", "--temperature", "0"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr
    for what in ("tokens", "tokens/s", "steps", "drafted", "accepted", "cached"):
        assert what in last, (done.stdout, done.stderr)
    assert re.match(r"\d+ tokens", last)


@pytest.mark.model
def test_the_real_model_answers_a_chat(real_stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{real_stack.http}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=20,
            temperature=0,
        )
    assert "Paris" in (reply.choices[0].message.content or "")


@pytest.mark.model
async def test_a_copying_prompt_is_faster_in_steps(real_stack: Stack) -> None:
    text = "The old clock in the hall struck seven, and the two cats looked at the closed door."
    async with Client(real_stack) as client:
        base = GenerateRequest(
            prompt=f"{text}\n{text}\n{text}\n", max_tokens=40, temperature=0.0, report_margins=True
        )
        on = await client.generate(base)
        off = await client.generate(
            GenerateRequest(
                prompt=base.prompt,
                max_tokens=40,
                temperature=0.0,
                report_margins=True,
                speculation=Speculation(k=0),
            )
        )
    assert not assert_same_output(on, off)
    assert on.usage is not None
    assert off.usage is not None
    assert off.usage.steps == 40
    assert on.usage.steps <= 15
