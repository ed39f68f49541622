"""The gateway's process where it cannot start: one line that says why, no traceback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from specsplit.gateway.main import main


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
