"""What `specsplit bench` waits for before it measures."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specsplit.cli.bench import _wait_ready


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """Alive until its input ends."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate(b"\n", timeout=20)


def write(folder: Path, *children: tuple[str, str]) -> None:
    stack: dict[str, Any] = {
        "children": [
            {"role": role, "state": state, "addresses": {"grpc": f"{role}:1"}} for role, state in children
        ]
    }
    (folder / "new.json").write_text(json.dumps(stack))
    (folder / "new.json").replace(folder / "stack.json")


def test_the_whole_stack_is_waited_for(tmp_path: Path, server: subprocess.Popen[bytes]) -> None:
    started = [("redis", "ready"), ("drafter", "ready"), ("verifier", "ready")]
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(_wait_ready(tmp_path, server)))
    write(tmp_path, *started)
    waiting.start()
    write(tmp_path, *started, ("gateway", "starting"))
    waiting.join(0.5)
    assert waiting.is_alive()
    write(tmp_path, *started, ("gateway", "ready"))
    waiting.join(20)
    assert found == ["gateway:1"]


def test_a_server_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(20)
    with pytest.raises(SystemExit, match="did not become ready"):
        _wait_ready(tmp_path, ended)
