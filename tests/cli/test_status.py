"""`specsplit status`: services that answer with their counters, and those that do not."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis_server import RedisServer

from specsplit.cli import status
from specsplit.cli.registry_server import find_program
from specsplit.core.codec.common import stats_to_pb
from specsplit.core.registry.scripts import Answer, ReplicaState
from specsplit.core.registry.writer import RegistryWriter, connect
from specsplit.v1 import drafter_pb2_grpc, gateway_pb2_grpc


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


class RoutingGateway(gateway_pb2_grpc.GatewayServicer):
    async def Stats(self, request: Any, context: Any) -> Any:
        counters = {"routed_by_registry": 3, "routed_by_memory": 5}
        for index, cached in enumerate((96, 0)):
            counters |= {f"replica_{index}_up": 1 - index, f"replica_{index}_requests": 7 + index}
            counters |= {f"replica_{index}_free_blocks": 11, f"replica_{index}_cached_tokens": cached}
            counters |= {f"replica_{index}_prompt_tokens": 640}
            counters |= {f"replica_{index}_predicted_cached_tokens": 112}
        return stats_to_pb(counters)


@pytest.fixture
async def gateway() -> AsyncIterator[str]:
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServicer_to_server(RoutingGateway(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=0)


@pytest.fixture
def valkey() -> Iterator[RedisServer]:
    server = RedisServer(str(find_program()))
    yield server
    server.close()


def write_stack(folder: Path, address: str, redis_url: str | None = None) -> None:
    child = {"role": "drafter", "index": 0, "pid": 77, "restarts": 3, "state": "ready"}
    children = [{**child, "addresses": {"grpc": address}}]
    if redis_url is not None:
        socket = redis_url.removeprefix("unix://")
        children.append({**child, "role": "redis", "addresses": {"unix": socket}})
    (folder / "stack.json").write_text(json.dumps({"redis_url": redis_url, "children": children}))


def publish(url: str) -> None:
    with connect(url, timeout_seconds=5) as client:
        writer = RegistryWriter(
            client,
            namespace=bytes.fromhex("0123456789abcdef"),
            name="10.0.0.1:50053",
            address="10.0.0.1:50053",
            incarnation=bytes.fromhex("beef" * 8),
            ttl_seconds=60,
        )
        assert writer.register(expected="", state=ReplicaState.SERVING)
        hashes = [bytes([number]) * 16 for number in range(23)]
        assert writer.apply(1, added=hashes, removed=[]) is Answer.OK


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


async def test_the_replicas_of_the_registry_and_the_hits_of_the_gateway(
    drafter: str,
    gateway: str,
    valkey: RedisServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    publish(valkey.url)
    write_stack(tmp_path, drafter, valkey.url)
    assert await asyncio.to_thread(status.main, ["--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for text in ("redis-0", "used_memory"):
        assert text in shown
    (row,) = (line for line in shown.splitlines() if "0123456789abcdef" in line)
    assert re.findall(r"[\w.:]+", row) == [
        "0123456789abcdef",
        "10.0.0.1:50053",
        "beefbeef",
        "serving",
        "23",
        "1",
    ]

    flags = ["--gateway", gateway, "--redis-url", valkey.url]
    assert await asyncio.to_thread(status.main, flags) == 0
    shown = capsys.readouterr().out
    assert "gateway-0: routed 3 by registry, 5 by memory" in shown
    rows = [re.findall(r"\w+", line) for line in shown.splitlines() if "│ verifier " in line]
    assert rows == [
        ["verifier", "0", "1", "7", "11", "640", "112", "96"],
        ["verifier", "1", "0", "8", "11", "640", "112", "0"],
    ]
    assert "replica_0" not in shown
    assert "beefbeef" in shown


async def test_a_registry_that_is_away_is_told_beside_all_the_rest(
    drafter: str,
    valkey: RedisServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_stack(tmp_path, drafter, valkey.url)
    valkey.stop()
    assert await asyncio.to_thread(status.main, ["--dir", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "The registry does not answer" in shown
    assert "rows 41, drafted 97" in shown
    assert "no answer" in shown  # the supervised server's own row


def test_a_wrong_url_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        status.main(["--redis-url", "localhost"])
    assert raised.value.code == 2
    assert "--redis-url: Redis URL must specify" in capsys.readouterr().err


def test_a_service_that_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound but not listening
        taken.bind(("127.0.0.1", 0))
        write_stack(tmp_path, f"127.0.0.1:{taken.getsockname()[1]}")
        assert status.main(["--dir", str(tmp_path)]) == 1
    assert "no answer" in capsys.readouterr().out


def test_no_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["--dir", str(tmp_path)]) == 1
    assert "stack.json" in capsys.readouterr().err
