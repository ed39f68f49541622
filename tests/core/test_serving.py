"""The life of a service process, watched from outside: health, announcement, drain, failure."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsplit.core.errors import InvalidRequest, ModelNotFound, SpecsplitError
from specsplit.core.serving import (
    GrpcService,
    ListenSettings,
    abort,
    join_address,
    num_open_files,
    open_channel,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Child:
    """The example service; `line` reads what it says, `say` ends its start or its drain."""

    def __init__(self, process: subprocess.Popen[str], announce: Path) -> None:
        self.process = process
        self._announce = announce

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def announced(self) -> dict[str, Any]:
        written: dict[str, Any] = json.loads(self._announce.read_text())
        return written

    async def statuses(self, name: str) -> AsyncIterator[int]:
        async with open_channel(self.announced()["addresses"]["grpc"]) as channel:
            async for update in health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=name)
            ):
                yield update.status


@pytest.fixture
def start_child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    with ExitStack() as stack:

        def start(*flags: str) -> Child:
            announce = tmp_path / "announced.json"
            program = Path(__file__).parent / "example_service.py"
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(program), "--announce", str(announce), *flags],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return Child(process, announce)

        yield start


async def test_health_follows_start_drain_and_stop(start_child: Callable[..., Child]) -> None:
    child = start_child()
    assert child.line() == "starting"
    ready, alive = child.statuses("example"), child.statuses("")
    assert await anext(ready) == NOT_SERVING
    assert await anext(alive) == SERVING
    assert child.announced()["pid"] == child.process.pid
    child.say("started")
    assert await anext(ready) == SERVING
    assert set(child.announced()["addresses"]) == {"grpc", "http"}
    child.process.send_signal(signal.SIGTERM)
    assert await anext(ready) == NOT_SERVING
    assert child.line() == "draining"
    async with open_channel(child.announced()["addresses"]["grpc"]) as channel:  # alive while it drains
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert reply.status == SERVING
    child.say("drained")
    assert child.line() == "closed"
    assert await asyncio.to_thread(child.process.wait) == 0
    with pytest.raises(grpc.aio.AioRpcError):
        await anext(ready)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_the_start(start_child: Callable[..., Child], number: signal.Signals) -> None:
    child = start_child()
    assert child.line() == "starting"
    child.process.send_signal(number)
    assert child.line() == "closed"
    assert child.process.wait() == 0


def test_a_failed_start_is_loud_and_still_closes(start_child: Callable[..., Child]) -> None:
    child = start_child()
    assert child.line() == "starting"
    child.say("fail")
    _, errors = child.process.communicate()
    assert child.process.returncode != 0
    assert "no model" in errors


async def test_a_drain_is_cut_after_its_time(start_child: Callable[..., Child]) -> None:
    child = start_child("--drain-seconds", "0.01")
    assert child.line() == "starting"
    child.say("started")
    async for status in child.statuses("example"):
        if status == SERVING:
            break
    child.process.send_signal(signal.SIGTERM)
    assert child.line() == "draining"
    assert child.line() == "closed"
    assert await asyncio.to_thread(child.process.wait) == 0


def test_a_taken_port_is_an_error(start_child: Callable[..., Child]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = start_child("--port", str(port))
        output, errors = child.process.communicate()
    assert child.process.returncode != 0
    assert f"cannot listen on 127.0.0.1:{port}" in errors
    assert "starting" not in output


@pytest.mark.parametrize(
    ("error", "status", "metadata"),
    [
        (
            InvalidRequest("top_p must be positive", field="top_p"),
            grpc.StatusCode.INVALID_ARGUMENT,
            {"specsplit-code": "invalid_request", "specsplit-field": "top_p"},
        ),
        (ModelNotFound("no such model"), grpc.StatusCode.NOT_FOUND, {"specsplit-code": "model_not_found"}),
    ],
)
async def test_abort_carries_status_code_and_field(
    error: SpecsplitError, status: grpc.StatusCode, metadata: dict[str, str]
) -> None:
    async def handler(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await abort(context, error)

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Call": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Test/Call")(b"", timeout=10)
    await server.stop(grace=0)
    assert caught.value.code() is status
    assert caught.value.details() == error.message
    assert dict(caught.value.trailing_metadata() or ()).items() >= metadata.items()


def test_every_error_has_a_real_grpc_status() -> None:
    def family(kind: type[SpecsplitError]) -> Iterator[type[SpecsplitError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from family(child)

    for kind in family(SpecsplitError):
        assert grpc.StatusCode[kind.grpc_status]
        assert 400 <= kind.http_status < 600


@pytest.mark.parametrize(
    ("host", "joined"), [("127.0.0.1", "127.0.0.1:80"), ("a.example", "a.example:80"), ("::1", "[::1]:80")]
)
def test_an_ipv6_address_is_joined_in_brackets(host: str, joined: str) -> None:
    assert join_address(host, 80) == joined


def test_open_files_are_counted() -> None:
    before = num_open_files()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    assert num_open_files() == before + 1
    os.close(descriptor)
    assert num_open_files() == before


@asynccontextmanager
async def relay(port: int) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An address that forwards to `port` until the event is set: then both sides only hear nothing more."""
    is_frozen = asyncio.Event()
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if is_frozen.is_set():
                await asyncio.Event().wait()
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        pumps.add(asyncio.create_task(pump(reader, far_writer)))
        pumps.add(asyncio.create_task(pump(far_reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", is_frozen
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        server.close()


@pytest.mark.timeout(60)
async def test_a_silent_peer_is_noticed_on_both_sides() -> None:
    """Its connection stays open, as that of a frozen process or of a machine that lost its network."""
    has_ended = asyncio.Event()

    async def hold(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        context.add_done_callback(lambda _: has_ended.set())  # type: ignore[arg-type]
        yield b"begun"
        await asyncio.Event().wait()

    server = GrpcService("example", ListenSettings()).server
    server.add_registered_method_handlers("t", {"Hold": grpc.unary_stream_rpc_method_handler(hold)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with relay(port) as (address, is_frozen), open_channel(address) as channel:
        call = channel.unary_stream("/t/Hold")(b"")
        assert await call.read() == b"begun"
        is_frozen.set()
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await call.read()
        await has_ended.wait()
    await server.stop(grace=None)
