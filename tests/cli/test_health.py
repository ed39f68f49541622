"""`specsplit health`: the exit status that container engines ask for."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specsplit.cli.health import main


def test_a_drafter_is_ready_until_it_ends(tmp_path: Path) -> None:
    announce = tmp_path / "announce.json"
    drafter = subprocess.Popen(
        [
            *(sys.executable, "-m", "specsplit.cli", "drafter", "--port", "0", "--metrics-port", "0"),
            *("--announce", str(announce)),
        ]
    )
    try:
        deadline = time.monotonic() + 60
        while not announce.exists():
            assert drafter.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        address = json.loads(announce.read_text())["addresses"]["grpc"]
        while main(["drafter", "--address", address]) != 0:
            assert time.monotonic() < deadline
        assert main(["verifier", "--address", address]) == 1  # something else listens there
    finally:
        drafter.terminate()
        drafter.wait(30)
    assert main(["drafter", "--address", address]) == 1


@pytest.mark.parametrize("role", ["gateway", "drafter", "verifier"])
def test_nobody_and_nonsense_are_not_ready(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"\x00 nonsense \r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert main([role, "--address", address]) == 1
        thread.join(20)
    assert main([role, "--address", address]) == 1
    assert f"{role} at {address} is not ready" in capsys.readouterr().err


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(SystemExit) as refused:
        main(["redis"])
    assert refused.value.code == 2
