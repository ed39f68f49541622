"""Supervision of real processes: ready lines, deaths, restarts on the same ports, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

TIMEOUT_SECONDS = 30.0


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


def test_a_line_per_service_and_a_file_that_names_them(start: Callable[..., Any]) -> None:
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


def test_a_killed_child_is_reported_and_comes_back_on_its_port(start: Callable[..., Any]) -> None:
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
def test_a_signal_stops_everything_cleanly(start: Callable[..., Any], number: signal.Signals) -> None:
    stack = start()
    stack.read_until("all ready")
    processes = stack.processes()
    addresses = [stack.child(role)["addresses"]["grpc"] for role in ("first", "second")]
    stack.process.send_signal(number)
    assert stack.end()[0] == 0
    assert_all_gone(processes, addresses)
    for role in ("first", "second"):
        assert (stack.child(role)["state"], stack.child(role)["pid"]) == ("stopped", None)


def test_the_last_started_stops_first_and_a_second_ctrl_c_kills(start: Callable[..., Any]) -> None:
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


def test_a_killed_supervisor_leaves_nothing(start: Callable[..., Any]) -> None:
    stack = start()
    stack.read_until("all ready")
    processes = stack.processes()
    addresses = [stack.child(role)["addresses"]["grpc"] for role in ("first", "second")]
    assert len(processes) == 2
    stack.process.kill()
    assert_all_gone(processes, addresses)


def test_helpers_of_a_dead_child_die_with_it(start: Callable[..., Any], tmp_path: Path) -> None:
    stack = start(f"--first=--helper={tmp_path / 'helper'}")
    stack.read_until("all ready")
    helper = psutil.Process(int((tmp_path / "helper").read_text()))
    os.kill(stack.child("first")["pid"], signal.SIGKILL)
    stack.read_until("ready again")
    assert_all_gone([helper], [])


def test_a_child_that_never_starts_ends_the_stack(start: Callable[..., Any]) -> None:
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


def test_a_folder_has_one_supervisor(start: Callable[..., Any]) -> None:
    stack = start()
    stack.read_until("all ready")
    status, _, err = start().end()
    assert status == 1
    assert "in use by another supervisor" in err
    assert stack.child("first")["state"] == "ready"
