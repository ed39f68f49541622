"""A stack of two fake services under a real supervisor, as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

FAKE_STACK = Path(__file__).with_name("fake_stack.py")
TIMEOUT_SECONDS = 30.0


class FakeStack:
    """A running fake stack, with the lines of its terminal."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE_STACK), str(folder), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read_until(self, text: str) -> list[str]:
        """The lines up to the one that contains `text`."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line.rstrip("\n"))
            if text in line:
                return lines
        pytest.fail(f"ended before {text!r}: {lines}")

    def child(self, role: str) -> dict[str, Any]:
        children = json.loads((self.folder / "stack.json").read_text())["children"]
        (child,) = (child for child in children if child["role"] == role)
        return dict(child)

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=TIMEOUT_SECONDS)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., FakeStack]]:
    stacks: list[FakeStack] = []

    def start_stack(*flags: str) -> FakeStack:
        stacks.append(FakeStack(tmp_path / "stack", *flags))
        return stacks[-1]

    yield start_stack
    for stack in stacks:
        stack.process.kill()
        stack.process.communicate()
