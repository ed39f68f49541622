"""Inputs that broke other servers, on the tiny model: stops, limits, context, cancellation."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from stack_harness import Client, Result, Stack, assert_same_output

from specsplit.core.types import GenerateRequest, Speculation

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CONTEXT = 64


@pytest.fixture(scope="module")
def small_stack(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A context of 64 tokens and memory for two such sequences: neighbours preempt each other."""
    stack = Stack(
        tmp_path_factory.mktemp("small"),
        *("--model", str(tiny_model_dir), "--max-sequence-tokens", str(CONTEXT), "--num-blocks", "8"),
    )
    yield stack
    assert stack.stop() == 0


def request(prompt: str | tuple[int, ...], *, k: int = 4, **params: object) -> GenerateRequest:
    defaults: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, "report_margins": True}
    return GenerateRequest(prompt=prompt, speculation=Speculation(k=k), **{**defaults, **params})  # type: ignore[arg-type]


async def looping(client: Client) -> GenerateRequest:
    """A request whose greedy text falls into a loop, so that whole drafts are accepted."""
    for prompt in ("abc", "Hello", "1 2 3", "xyz xyz", "The", "q"):
        candidate = request(prompt, max_tokens=60)
        usage = (await client.generate(candidate)).usage
        if usage is not None and sum(usage.accepted_by_position[3:4]) >= 4:
            return candidate
    raise AssertionError("no prompt makes this model repeat itself")


def with_params(base: GenerateRequest, **params: object) -> GenerateRequest:
    return dataclasses.replace(base, **params)  # type: ignore[arg-type]


async def test_a_stop_string_in_the_middle_of_a_run(tiny_stack: Stack) -> None:
    """Cases 1 and 3: text, ids, logprobs and usage agree on one cut, wherever in the run it lies."""
    async with Client(tiny_stack) as client:
        base = await looping(client)
        full = await client.generate(with_params(base, num_logprobs=2))
        assert len(full.ids) == len(full.logprobs) == len(full.margins) == 60
        num_checked = 0
        for start in range(4, 40, 3):
            stop = full.text[start : start + 3]
            if len(stop) < 3:
                continue
            cut = full.text.index(stop)
            got = await client.generate(with_params(base, stop=(stop,), num_logprobs=2))
            plain = await client.generate(
                with_params(base, stop=(stop,), num_logprobs=2, speculation=Speculation(k=0))
            )
            assert (got.text, got.finish_reason) == (full.text[:cut], "stop")
            assert got.ids == full.ids[: len(got.ids)] == plain.ids
            assert got.text == plain.text
            assert got.usage is not None
            assert len(got.ids) == len(got.logprobs) == len(got.margins) == got.usage.completion_tokens
            assert [lp.top_ids for lp in got.logprobs] == [lp.top_ids for lp in full.logprobs[: len(got.ids)]]
            assert sum(got.usage.accepted_by_position) == got.usage.accepted <= got.usage.drafted
            num_checked += 1
        assert num_checked >= 6


async def test_the_stop_that_ends_first_wins(tiny_stack: Stack) -> None:
    """Case 2: whatever the order of the list, streamed and unstreamed alike."""
    async with Client(tiny_stack) as client, httpx.AsyncClient(base_url=tiny_stack.http) as http:
        base = await looping(client)
        full = await client.generate(base)
        stops = [full.text[10:12], full.text[6:9], full.text[20:21]]
        ends = {s: full.text.index(s) + len(s) for s in stops}
        winner = min(stops, key=lambda s: (ends[s], -len(s)))
        expected = full.text[: ends[winner] - len(winner)]
        for order in itertools.permutations(stops):
            assert (await client.generate(with_params(base, stop=order))).text == expected
            body = {"model": "", "prompt": base.prompt, "max_tokens": 60, "temperature": 0}
            body |= {"stop": list(order), "ignore_eos": True}
            body["model"] = (await http.get("/v1/models")).json()["data"][0]["id"]
            reply = await http.post("/v1/completions", json=body)
            assert reply.json()["choices"][0]["text"] == expected


async def test_the_cap_and_a_stop_in_one_run(tiny_stack: Stack) -> None:
    """Case 3: whichever comes first says why; a stop completed by the very last token is a stop."""
    async with Client(tiny_stack) as client:
        base = await looping(client)
        full = await client.generate(base)
        for cap in range(1, 12):
            got = await client.generate(with_params(base, max_tokens=cap, stop=(full.text[2:3],)))
            index = full.text.index(full.text[2:3])
            if got.finish_reason == "stop":
                assert got.text == full.text[:index]
                assert len(got.ids) <= cap
            else:
                assert len(got.ids) == cap
                assert full.text[2:3] not in got.text


async def test_max_tokens_inside_an_accepted_run(tiny_stack: Stack) -> None:
    """Case 4: from 1 to k + 2, exactly that many in text, ids and usage."""
    async with Client(tiny_stack) as client:
        base = await looping(client)
        full = await client.generate(base)
        prompt = tuple(
            full.prompt_ids + full.ids[:30]
        )  # deep in the loop: drafts are accepted from the start
        reference = await client.generate(request(prompt, k=0, max_tokens=20))
        for k in (1, 4, 8):
            for cap in range(1, k + 3):
                got = await client.generate(request(prompt, k=k, max_tokens=cap))
                assert got.ids == reference.ids[:cap]
                assert got.usage is not None
                assert (got.usage.completion_tokens, got.finish_reason) == (cap, "length")
                assert got.usage.drafted <= cap * k


async def test_min_tokens_inside_a_run(tiny_stack: Stack) -> None:
    """Case 5: no end before min_tokens, none forbidden after; the same with and without drafts."""
    async with Client(tiny_stack) as client:
        base = await looping(client)
        full = await client.generate(base)
        frequent = max(set(full.ids[10:]), key=full.ids[10:].count)  # comes again and again
        for minimum in range(0, 30, 3):
            params = {"stop_token_ids": (frequent,), "min_tokens": minimum, "max_tokens": 60}
            got = await client.generate(with_params(base, **params))
            plain = await client.generate(with_params(base, speculation=Speculation(k=0), **params))
            assert not assert_same_output(got, plain)
            assert len(got.ids) > minimum
            assert frequent not in got.ids[:minimum]
            if got.finish_reason == "stop":
                assert got.ids[-1] == frequent
                assert got.ids.count(frequent) == 1


async def test_the_context_limit_is_exact(small_stack: Stack) -> None:
    """Case 10, with neighbours that preempt each other, and case 11's kind with k = 16."""
    k = 4
    async with Client(small_stack) as client:
        lengths = [CONTEXT - 1, CONTEXT - k, CONTEXT - k - 1, CONTEXT // 2, 8]
        prompts = [tuple((7 * i + j) % 250 for j in range(n)) for i, n in enumerate(lengths * 3)]
        references = [await client.generate(request(prompt, k=0)) for prompt in prompts]
        before = small_stack.stats("verifier")["preemptions"]
        for draft in (k, 16):
            results = await client.generate_all([request(prompt, k=draft) for prompt in prompts])
            for prompt, got, reference in zip(prompts, results, references, strict=True):
                assert_same_output(got, reference)
                assert got.finish_reason == "length"
                assert len(prompt) + len(got.ids) == CONTEXT
        assert small_stack.stats("verifier")["preemptions"] > before, "the case needs preemptions"


async def test_a_prompt_as_long_as_the_context_is_refused(small_stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=small_stack.http) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        for length, status in ((CONTEXT - 1, 200), (CONTEXT, 400), (CONTEXT + 1, 400)):
            body = {"model": model, "prompt": [1] * length, "max_tokens": 1}
            reply = await http.post("/v1/completions", json=body)
            assert reply.status_code == status, reply.text
            if status == 400:
                error = reply.json()["error"]
                assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.model
async def test_hello_56_times_in_a_context_of_64(
    smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Case 11, on the real model: ends at 64 tokens."""
    stack = Stack(
        tmp_path_factory.mktemp("hello"),
        *("--max-sequence-tokens", "64", "--speculation-k", "16", "--num-blocks", "16"),
    )
    try:
        async with Client(stack) as client:
            got = await client.generate(
                GenerateRequest(prompt="Hello " * 56, temperature=0.0, report_margins=True)
            )
            plain = await client.generate(
                GenerateRequest(
                    prompt="Hello " * 56,
                    temperature=0.0,
                    report_margins=True,
                    speculation=Speculation(k=0),
                )
            )
        assert_same_output(got, plain)
        assert got.finish_reason == "length"
        assert len(got.prompt_ids) + len(got.ids) == 64
    finally:
        assert stack.stop() == 0


def open_fds(stack: Stack) -> dict[str, int]:
    return {
        role: len(os.listdir(f"/proc/{stack.pid(role)}/fd")) for role in ("gateway", "verifier", "drafter")
    }


def wait_closed(stack: Stack, before: dict[str, int]) -> None:
    """Until no service holds more descriptors than before; sockets of ended calls close a little later."""
    deadline = time.monotonic() + 60
    while any(now > before[role] for role, now in open_fds(stack).items()):
        assert time.monotonic() < deadline, (before, open_fds(stack))
        time.sleep(0.1)


async def at_baseline(stack: Stack, free_blocks: int) -> None:
    """Tables are empty in all services and every block can be allocated again."""

    def settled() -> None:
        stack.wait_stats("gateway", lambda s: s["requests"] == 0, "an empty table")
        stack.wait_stats(
            "verifier",
            lambda s: s["open_requests"] == 0 and s["free_blocks"] == free_blocks,
            "an empty table and all blocks free",
        )
        stack.wait_stats(
            "drafter", lambda s: s["requests"] == 0 and s["context_tokens"] == 0, "an empty table"
        )

    await asyncio.to_thread(settled)


async def test_cancelled_anywhere_leaves_nothing(tiny_stack: Stack) -> None:
    """Case 19: the client closes its stream during prefill, a draft, a verify."""
    rng = random.Random(3)
    free_blocks = tiny_stack.stats("verifier")["total_blocks"]
    async with Client(tiny_stack) as client:

        async def one(i: int) -> Result:
            prompt = tuple(rng.randrange(250) for _ in range(rng.choice((3, 40, 180))))
            return await client.generate(
                request(prompt, max_tokens=60), cancel_after=rng.choice((0, 1, 2, 5, 11))
            )

        for _ in range(4):
            await asyncio.gather(*(one(i) for i in range(24)))
        await at_baseline(tiny_stack, free_blocks)
        assert (await client.generate(request("abc", max_tokens=8))).finish_reason == "length"
    assert tiny_stack.stats("gateway")["invariant_violations"] == 0
    assert tiny_stack.stats("gateway")["requests_cancelled"] > 50


async def test_2000_short_requests_leave_nothing(tiny_stack: Stack) -> None:
    """Blocks, request tables and file descriptors are back at their baseline."""
    rng = random.Random(5)
    free_blocks = tiny_stack.stats("verifier")["total_blocks"]
    async with Client(tiny_stack) as client:
        await client.generate_all([request("warm", max_tokens=4) for _ in range(32)])
        await at_baseline(tiny_stack, free_blocks)
        before = open_fds(tiny_stack)
        requests = [
            request(
                tuple(rng.randrange(250) for _ in range(rng.randrange(1, 24))), max_tokens=rng.randrange(1, 5)
            )
            for _ in range(2000)
        ]
        results = await client.generate_all(requests, limit=64)
        assert [len(r.ids) for r in results] == [r.max_tokens for r in requests]
        await at_baseline(tiny_stack, free_blocks)
        await asyncio.to_thread(wait_closed, tiny_stack, before)
    assert tiny_stack.stats("gateway")["invariant_violations"] == 0
