"""`specsplit status`: services that answer with their counters, and those that do not."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from specsplit.cli import status
from specsplit.core.codec.common import stats_to_pb
from specsplit.v1 import drafter_pb2_grpc


class CountingDrafter(drafter_pb2_grpc.DrafterServicer):
    async def Stats(self, request: Any, context: Any) -> Any:
        return stats_to_pb({"rows": 41, "drafted": 97})


@pytest.fixture
async def drafter() -> AsyncIterator[str]:
    server = grpc.aio.server()
    drafter_pb2_grpc.add_DrafterServicer_to_server(CountingDrafter(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=0)


def write_stack(folder: Path, address: str) -> None:
    child = {"role": "drafter", "index": 0, "pid": 77, "restarts": 3, "state": "ready"}
    (folder / "stack.json").write_text(json.dumps({"children": [{**child, "addresses": {"grpc": address}}]}))


async def test_a_stack_is_shown_with_its_counters(
    drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_stack(tmp_path, drafter)
    assert await asyncio.to_thread(status.main, ["--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for text in ("drafter-0", "77", "ready", "3", drafter, "rows 41, drafted 97"):
        assert text in shown


async def test_addresses_in_place_of_a_stack(drafter: str) -> None:
    assert await asyncio.to_thread(status.main, ["--drafter", drafter]) == 0


def test_a_service_that_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound but not listening
        taken.bind(("127.0.0.1", 0))
        write_stack(tmp_path, f"127.0.0.1:{taken.getsockname()[1]}")
        assert status.main(["--dir", str(tmp_path)]) == 1
    assert "no answer" in capsys.readouterr().out


def test_no_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["--dir", str(tmp_path)]) == 1
    assert "stack.json" in capsys.readouterr().err
