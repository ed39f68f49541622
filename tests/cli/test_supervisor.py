"""Supervision of real processes: ready lines, deaths, restarts on the same ports, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

FAKE_STACK = Path(__file__).with_name("fake_stack.py")
TIMEOUT_SECONDS = 30.0


class Stack:
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
def start(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def start_stack(*flags: str) -> Stack:
        stacks.append(Stack(tmp_path / "stack", *flags))
        return stacks[-1]

    yield start_stack
    for stack in stacks:
        stack.process.kill()
        stack.process.communicate()


def is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except ConnectionRefusedError:
        return False
    return True


def assert_all_gone(processes: list[psutil.Process], addresses: list[str]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_SECONDS)
    assert alive == []
    assert [address for address in addresses if is_listening(address)] == []


def test_a_line_per_service_and_a_file_that_names_them(start: Callable[..., Stack]) -> None:
    stack = start()
    lines = stack.read_until("all ready")
    for role in ("first", "second"):
        child = stack.child(role)
        (line,) = (line for line in lines if line.startswith(f"{role}-0"))
        assert "ready in" in line
        assert child["addresses"]["grpc"] in line
        assert is_listening(child["addresses"]["grpc"])
        assert psutil.pid_exists(child["pid"])
        assert (child["index"], child["restarts"], child["state"]) == (0, 0, "ready")
    assert json.loads((stack.folder / "stack.json").read_text())["pid"] == stack.process.pid


def test_a_killed_child_is_reported_and_comes_back_on_its_port(start: Callable[..., Stack]) -> None:
    stack = start()
    stack.read_until("all ready")
    before = stack.child("first")
    os.kill(before["pid"], signal.SIGKILL)
    lines = stack.read_until("ready again")
    assert any("first-0 was killed by SIGKILL after" in line for line in lines)
    after = stack.child("first")
    assert after["addresses"] == before["addresses"]
    assert after["pid"] != before["pid"]
    assert after["restarts"] == 1
    assert is_listening(after["addresses"]["grpc"])
    assert stack.child("second")["restarts"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_cleanly(start: Callable[..., Stack], number: signal.Signals) -> None:
    stack = start()
    stack.read_until("all ready")
    processes = stack.processes()
    addresses = [stack.child(role)["addresses"]["grpc"] for role in ("first", "second")]
    stack.process.send_signal(number)
    assert stack.end()[0] == 0
    assert_all_gone(processes, addresses)
    for role in ("first", "second"):
        assert (stack.child(role)["state"], stack.child(role)["pid"]) == ("stopped", None)


def test_the_last_started_stops_first_and_a_second_ctrl_c_kills(start: Callable[..., Stack]) -> None:
    stack = start("--second=--ignore-sigterm", "--drain-seconds=600")
    stack.read_until("all ready")
    processes = stack.processes()
    addresses = [stack.child(role)["addresses"]["grpc"] for role in ("first", "second")]
    stack.process.send_signal(signal.SIGINT)
    stack.read_until("stopping")
    assert is_listening(addresses[0])
    stack.process.send_signal(signal.SIGINT)
    assert stack.end()[0] == 130
    assert_all_gone(processes, addresses)


def test_a_killed_supervisor_leaves_nothing(start: Callable[..., Stack]) -> None:
    stack = start()
    stack.read_until("all ready")
    processes = stack.processes()
    addresses = [stack.child(role)["addresses"]["grpc"] for role in ("first", "second")]
    assert len(processes) == 2
    stack.process.kill()
    assert_all_gone(processes, addresses)


def test_helpers_of_a_dead_child_die_with_it(start: Callable[..., Stack], tmp_path: Path) -> None:
    stack = start(f"--first=--helper={tmp_path / 'helper'}")
    stack.read_until("all ready")
    helper = psutil.Process(int((tmp_path / "helper").read_text()))
    os.kill(stack.child("first")["pid"], signal.SIGKILL)
    stack.read_until("ready again")
    assert_all_gone([helper], [])


def test_a_child_that_never_starts_ends_the_stack(start: Callable[..., Stack]) -> None:
    stack = start("--second=--exit=3")
    stack.read_until("second-0 exited with status 3")
    processes = stack.processes()
    address = stack.child("first")["addresses"]["grpc"]
    status, _, err = stack.end()
    assert status == 1
    assert "second-0 exited with status 3" in err
    assert "cannot start: the reason" in err
    assert_all_gone(processes, [address])
    assert stack.child("second")["restarts"] == 4


def test_a_folder_has_one_supervisor(start: Callable[..., Stack]) -> None:
    stack = start()
    stack.read_until("all ready")
    status, _, err = start().end()
    assert status == 1
    assert "in use by another supervisor" in err
    assert stack.child("first")["state"] == "ready"
