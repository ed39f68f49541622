"""The gateway's process where it cannot start: one line that says why, no traceback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from specsplit.core.settings import load_settings
from specsplit.gateway.main import main
from specsplit.gateway.settings import GatewaySettings


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "flags", [("--port", "{}", "--http-port", "0"), ("--port", "0", "--http-port", "{}")]
)
def test_a_taken_port_is_said_in_one_line(
    flags: tuple[str, ...], taken_port: int, byte_tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--tokenizer", str(byte_tokenizer_dir), *(flag.format(taken_port) for flag in flags)]
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specsplit gateway")]
    assert f"cannot listen on 127.0.0.1:{taken_port}" in line


def test_a_folder_without_a_tokenizer_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--tokenizer", str(tmp_path), "--port", "0", "--http-port", "0"])
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specsplit gateway: error: no tokenizer.json in")


@pytest.mark.parametrize(
    ("flag", "value", "what"),
    [
        ("--verifiers", "a:1,a:1", "must not name an address twice"),
        ("--verifiers", "nocolon", "verifiers.0"),
        ("--verifiers", "a:1,,b:2", "verifiers.1"),
        ("--drafter", "host:port", "drafter"),
        ("--redis-url", "host:6379", "redis_url"),
        ("--redis-url", "unix://", "redis_url"),
        ("--trace-ratio", "2", "trace_ratio"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, what: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--tokenizer", "/", flag, value])
    assert refused.value.code == 2
    assert what in capsys.readouterr().err


def test_several_verifiers_come_from_flag_variable_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text('tokenizer = "/"\nverifiers = ["e:5", "[::1]:6"]\n')
    assert load_settings(GatewaySettings, ["--config", str(config)], prog="x").verifiers == ("e:5", "[::1]:6")
    monkeypatch.setenv("SPECSPLIT_GATEWAY_VERIFIERS", "c:3, d:4")
    assert load_settings(GatewaySettings, ["--tokenizer", "/"], prog="x").verifiers == ("c:3", "d:4")
    flags = ["--tokenizer", "/", "--verifiers", "a:1,b:2"]
    assert load_settings(GatewaySettings, flags, prog="x").verifiers == ("a:1", "b:2")
