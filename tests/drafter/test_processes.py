"""The drafter and the scripted drafter as real processes: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsplit.core.codec import drafter as codec
from specsplit.core.digest import TokenDigest
from specsplit.core.serving import open_channel
from specsplit.core.types import DraftBatch, DraftRow, new_request_id
from specsplit.v1 import drafter_pb2_grpc

DRAFTER = (
    *("-c", "import sys; from specsplit.drafter.main import main; main(sys.argv[1:])"),
    *("--metrics-port", "0"),
)
SCRIPTED = (str(Path(__file__).parents[1] / "scripted_drafter.py"),)
SERVING = health_pb2.HealthCheckResponse.SERVING


def spawn(program: tuple[str, ...], *flags: str, announce: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *program, "--port", "0", "--announce", str(announce), *flags])


def wait_announced(process: subprocess.Popen[bytes], announce: Path) -> str:
    """Address of the process once it listens."""
    while not announce.exists():
        assert process.poll() is None, "ended before it listened"
        time.sleep(0.01)
    written = json.loads(announce.read_text())
    assert written["pid"] == process.pid
    return str(written["addresses"]["grpc"])


@asynccontextmanager
async def running(
    program: tuple[str, ...], *flags: str, announce: Path
) -> AsyncIterator[tuple[subprocess.Popen[bytes], grpc.aio.Channel]]:
    with spawn(program, *flags, announce=announce) as process:
        try:
            address = await asyncio.to_thread(wait_announced, process, announce)
            async with open_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                watch = health.Watch(health_pb2.HealthCheckRequest(service="specsplit.v1.Drafter"))
                async for update in watch:
                    if update.status == SERVING:
                        break
                watch.cancel()
                yield process, channel
        finally:
            process.kill()


async def draft(channel: grpc.aio.Channel, ids: list[int], k: int) -> tuple[int, ...]:
    call: Any = drafter_pb2_grpc.DrafterStub(channel).Run()
    row = DraftRow(new_request_id(), 1, len(ids), TokenDigest(ids).value, ids, k)
    await call.write(codec.command_to_pb(DraftBatch(1, (row,))))
    done = codec.batch_done_from_pb(await call.read())
    call.cancel()
    return tuple(done.rows[0].draft_ids)


async def test_sigterm_drains_and_ends_with_an_open_stream(tmp_path: Path) -> None:
    async with running(DRAFTER, announce=tmp_path / "drafter.json") as (process, channel):
        call: Any = drafter_pb2_grpc.DrafterStub(channel).Run()
        row = DraftRow(new_request_id(), 1, 5, TokenDigest([1, 2, 3, 1, 2]).value, (1, 2, 3, 1, 2), 2)
        await call.write(codec.command_to_pb(DraftBatch(1, (row,))))
        assert tuple((await call.read()).rows[0].draft_ids) == (3, 1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()


def test_wrong_settings_end_with_status_2_and_name_the_flag() -> None:
    ended = subprocess.run([sys.executable, *DRAFTER, "--max-n", "1"], capture_output=True, check=False)
    assert ended.returncode == 2
    assert b"max_n" in ended.stderr


def test_a_taken_port_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, *DRAFTER, "--port", port], capture_output=True, check=False, text=True
        )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert f"specsplit drafter: error: cannot listen on 127.0.0.1:{port}" in ended.stderr


def test_the_drafter_imports_no_torch_and_no_numpy() -> None:
    code = "import sys, specsplit.drafter.main; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code]).strip() == b"set()"


@pytest.fixture
def continuations(tmp_path: Path) -> Path:
    file = tmp_path / "continuations.json"
    file.write_text(json.dumps([list(range(100)), [0, 1, *range(50, 80)]]))
    return file


async def test_the_scripted_drafter_proposes_the_known_continuation(
    tmp_path: Path, continuations: Path
) -> None:
    flags = ("--continuations", str(continuations))
    async with running(SCRIPTED, *flags, announce=tmp_path / "scripted.json") as (_, channel):
        assert await draft(channel, list(range(10)), 4) == (10, 11, 12, 13)
        assert await draft(channel, [0, 1, 50], 4) == (51, 52, 53, 54)
        assert await draft(channel, list(range(98)), 4) == (98, 99)
        assert await draft(channel, [5, 6], 4) == ()


async def test_the_scripted_drafter_is_wrong_at_its_seeded_ratio(tmp_path: Path, continuations: Path) -> None:
    flags = ("--continuations", str(continuations), "--wrong-ratio", "0.5", "--seed", "3")
    async with running(SCRIPTED, *flags, announce=tmp_path / "scripted.json") as (_, channel):
        drafts = await draft(channel, list(range(10)), 32)
        assert drafts == await draft(channel, list(range(10)), 32)
        num_wrong = sum(id_ != position for position, id_ in enumerate(drafts, start=10))
        assert 6 <= num_wrong <= 26
