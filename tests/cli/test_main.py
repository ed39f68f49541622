"""The command line itself: what it lists, refuses, and does not import."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from specsplit.cli.main import main

SUBCOMMANDS = ["serve", "gateway", "drafter", "verifier", "generate", "bench", "status"]


@pytest.mark.parametrize("argv", [["--help"], ["-h"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert [name for name in SUBCOMMANDS if f"  {name} " not in shown] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specsplit ")


@pytest.mark.parametrize("argv", [[], ["sevre"], ["analyze"]])
def test_an_unknown_command_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "usage: specsplit COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--draft-model", "--drafters", "--gateways", "--tensor-parallel"])
def test_serve_refuses_flags_that_it_does_not_have(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["serve", flag, "1"])
    assert raised.value.code == 2
    assert flag in capsys.readouterr().err


def test_gateway_and_drafter_never_import_torch() -> None:
    code = (
        "import sys; import specsplit.cli.serve, specsplit.gateway.main, specsplit.drafter.main;"
        "print([m for m in ('torch', 'transformers', 'numpy', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_serve_refuses_a_taken_port_before_it_starts_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as raised:
            main(["serve", "--port", str(port), "--dir", str(tmp_path / "stack")])
    assert raised.value.code == 2
    assert f"port: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert not (tmp_path / "stack").exists()
