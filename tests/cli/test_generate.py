"""`specsplit generate` as a process against a small gateway: text, last line, refusals, Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from specsplit.core.codec.gateway import event_to_pb, generate_request_from_pb
from specsplit.core.errors import InvalidRequest
from specsplit.core.serving import abort
from specsplit.core.types import (
    ChatMessage,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    Speculation,
    Started,
    Usage,
)
from specsplit.v1 import gateway_pb2_grpc

USAGE = Usage(
    prompt_tokens=40,
    completion_tokens=5,
    cached_tokens=32,
    steps=2,
    drafted=4,
    accepted=3,
    accepted_by_position=(2, 1),
)


class SmallGateway(gateway_pb2_grpc.GatewayServicer):
    """Says "hello wörld" in two pieces; the prompt "refuse" is refused and "wait" never ends."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, pb: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        request = generate_request_from_pb(pb)
        self.requests.append(request)
        if request.prompt == "refuse":
            await abort(context, InvalidRequest("top_p must be lower", field="top_p"))
        yield event_to_pb(Started(bytes(16), (1, 2), 7))
        yield event_to_pb(Delta("hello w", (3, 4)))
        if request.prompt == "wait":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        yield event_to_pb(Delta("örld", (5, 6, 7)))
        yield event_to_pb(Finished(FinishReason.STOP, USAGE))


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[SmallGateway, str]]:
    servicer = SmallGateway()
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(grace=0)


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specsplit.cli", "generate", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await start(*arguments)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_text_and_a_last_line(gateway: tuple[SmallGateway, str]) -> None:
    servicer, address = gateway
    status, out, err = await run("say hello", "--address", address)
    assert (status, err) == (0, "")
    text, _, summary = out.rstrip("\n").rpartition("\n")
    assert text == "hello wörld\n"
    assert summary.startswith("5 tokens, ")
    assert summary.endswith("tokens/s, 2 steps, 4 drafted, 3 accepted, 32 of 40 prompt tokens cached")
    assert servicer.requests == [GenerateRequest(prompt=(ChatMessage("user", "say hello"),))]


async def test_every_flag_reaches_the_gateway(gateway: tuple[SmallGateway, str]) -> None:
    servicer, address = gateway
    flags = (
        "--max-tokens 9 --temperature 0 --top-p 0.5 --top-k 0 --min-p 0.25 --seed 18446744073709551615 --k 0"
    )
    status, _, err = await run(
        "once", "--raw", *flags.split(), "--stop", "a", "--stop", "b", "--address", address
    )
    assert (status, err) == (0, "")
    assert servicer.requests == [
        GenerateRequest(
            prompt="once",
            max_tokens=9,
            temperature=0.0,
            top_p=0.5,
            top_k=0,
            min_p=0.25,
            seed=2**64 - 1,
            speculation=Speculation(k=0),
            stop=("a", "b"),
        )
    ]


async def test_a_refusal_is_shown(gateway: tuple[SmallGateway, str]) -> None:
    status, out, err = await run("refuse", "--raw", "--address", gateway[1])
    assert (status, out) == (1, "")
    assert "top_p must be lower" in err
    assert "specsplit serve`" not in err


async def test_nothing_listens() -> None:
    with socket.socket() as taken:  # bound but not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        status, out, err = await run("hello", "--address", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (status, out) == (1, "")
    assert "`specsplit serve` starts one" in err


async def test_ctrl_c_cancels_the_call(gateway: tuple[SmallGateway, str]) -> None:
    servicer, address = gateway
    process = await start("wait", "--raw", "--address", address)
    assert process.stdout is not None
    assert await process.stdout.readexactly(7) == b"hello w"
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode == 130
    assert (out, err) == (b"\n", b"")
    await servicer.cancelled.wait()


@pytest.mark.parametrize("flags", [["--top-k", "-1"], ["--seed", str(2**64)], ["--max-tokens", "many"]])
async def test_a_wrong_value_names_its_flag(flags: list[str]) -> None:
    status, _, err = await run("hello", *flags)
    assert status == 2
    assert flags[0] in err
