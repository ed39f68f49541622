"""The stack's own Valkey: where it listens, how it is restarted, what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from specsplit.cli import registry_server
from specsplit.cli.main import main
from specsplit.core.errors import SettingsError


def test_it_serves_on_a_private_socket_alone_and_keeps_nothing(start: Callable[..., Any]) -> None:
    stack = start("--with-registry")
    stack.read_until("all ready")
    child = stack.child("redis")
    socket = Path(child["addresses"]["unix"])
    assert socket.stat().st_mode & 0o077 == 0
    assert psutil.Process(child["pid"]).net_connections("inet") == []
    with redis.Redis.from_url(registry_server.url(socket)) as client:
        client.set("a", 1)
        for name, value in (
            ("save", ""),
            ("appendonly", "no"),
            ("lazyfree-lazy-expire", "yes"),
            ("maxmemory", str(2**30)),
            ("maxmemory-policy", "noeviction"),
        ):
            assert client.config_get(name) == {name: value}
    stack.process.send_signal(signal.SIGINT)
    assert stack.end()[0] == 0
    assert not socket.exists()
    assert sorted(path.name for path in stack.folder.rglob("*.rdb")) == []


def test_one_that_dies_again_and_again_is_started_again_and_ends_nothing(start: Callable[..., Any]) -> None:
    stack = start("--with-registry")
    stack.read_until("all ready")
    socket = Path(stack.child("redis")["addresses"]["unix"])
    for num_restarts in range(1, 4):
        os.kill(stack.child("redis")["pid"], signal.SIGKILL)
        assert any("redis-0 was killed by SIGKILL" in line for line in stack.read_until("ready again"))
        with redis.Redis.from_url(registry_server.url(socket)) as client:
            assert client.ping()
        assert stack.child("redis")["restarts"] == num_restarts
    for role in ("first", "second"):
        assert (stack.child(role)["state"], stack.child(role)["restarts"]) == ("ready", 0)


def test_a_path_that_is_too_long_for_a_socket_is_replaced(tmp_path: Path) -> None:
    with registry_server.socket_path(tmp_path) as near:
        assert near == tmp_path / "redis.sock"
    with registry_server.socket_path(tmp_path / ("x" * 108)) as far:
        assert far.parent.is_dir()
        assert len(bytes(far)) < 108
    assert not far.parent.exists()


def test_a_path_with_any_character_is_a_url(tmp_path: Path) -> None:
    socket = tmp_path / "a b%20?#ü" / "redis.sock"
    socket.parent.mkdir()
    program = str(registry_server.find_program())
    server = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(socket), "--save", ""], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        while "Ready to accept connections" not in server.stdout.readline():
            assert server.poll() is None
        with redis.Redis.from_url(registry_server.url(socket)) as client:
            assert client.ping()
    finally:
        server.kill()
        server.communicate()


def test_without_the_package_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(registry_server, "files", missing)
    with pytest.raises(SettingsError, match=r"specsplit\[serve\]") as raised:
        registry_server.find_program()
    assert raised.value.field == "redis_url"


def test_a_url_that_is_none_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["serve", "--redis-url", "localhost:6379", "--dir", str(tmp_path / "stack")])
    assert raised.value.code == 2
    assert "redis_url: Redis URL must specify" in capsys.readouterr().err
    assert not (tmp_path / "stack").exists()


def test_serve_does_not_import_the_client_library() -> None:
    code = "import sys, specsplit.cli.serve; print('redis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
