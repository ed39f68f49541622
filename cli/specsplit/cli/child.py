"""One supervised service process and its successors on the same ports. Knows no other service.

A life of a child: spawn, wait for its announced addresses, wait until it is ready, wait until it ends. An end
that nobody asked for is reported and followed by another life, later each time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specsplit.cli import launcher

MIN_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
LONG_LIFE_SECONDS = 30.0  # a life this long resets the backoff
MAX_FAILED_STARTS = 5
NUM_TAIL_LINES = 15
_POLL_SECONDS = 0.02
_STARTING_GRACE_SECONDS = 3.0  # a child that is not ready has nothing to drain
_EXIT_GRACE_SECONDS = 5.0  # from the end of the drain to the end of the process

Addresses = Mapping[str, str]
State = Literal["starting", "ready", "restarting", "stopped"]


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a service: the key of its address, the flag that sets it, its number (0 takes a free one)."""

    kind: str
    flag: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How to run one service; `--announce`, `--restarts` and ports are added to `command`."""

    role: str
    index: int
    command: tuple[str, ...]
    ports: tuple[Port, ...]
    wait_ready: Callable[[Addresses], Awaitable[None]]
    env: Mapping[str, str]
    addresses: Addresses | None = None
    """Those of another project's program, which announces none: its `command` is left as it is."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


class StartFailed(Exception):
    """The services cannot be brought up; the message is for the terminal."""


class Child:
    """Keeps one service running until `stop`; `report` shows a line, `changed` hears of every change."""

    def __init__(
        self,
        spec: ServiceSpec,
        folder: Path,
        *,
        report: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.addresses: Addresses = {}
        self.pid: int | None = None
        self.num_restarts = 0
        self.state: State = "starting"
        self.log_path = folder / "logs" / f"{spec.name}.log"
        self.is_bound = asyncio.Event()
        self.is_ready = asyncio.Event()  # both stay set over later lives
        self._announce_path = folder / f"{spec.name}.announce.json"
        self._report = report
        self._changed = changed
        self._stop = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Returns after `stop`; raises StartFailed when MAX_FAILED_STARTS lives ended with none ready."""
        backoff = MIN_BACKOFF_SECONDS
        num_failed_starts = 0
        while True:
            born = time.monotonic()
            status = await self._live()
            lived = time.monotonic() - born
            if self._stop.is_set():
                break
            end = f"{_describe_exit(status)} after {lived:.1f} s"
            if not self.is_ready.is_set():
                num_failed_starts += 1
                if num_failed_starts == MAX_FAILED_STARTS:
                    self._set_state("stopped")
                    raise StartFailed(
                        f"{self.spec.name} {end}; gave up after {num_failed_starts} starts.\n{self._tail()}"
                    )
            if lived >= LONG_LIFE_SECONDS:
                backoff = MIN_BACKOFF_SECONDS
            self._report(f"{self.spec.name} {end}; starting it again in {backoff:.1f} s.\n{self._tail()}")
            self._set_state("restarting")
            try:
                await asyncio.wait_for(self._stop.wait(), backoff)
                break
            except TimeoutError:
                pass
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
            self.num_restarts += 1
        self._set_state("stopped")

    async def stop(self, drain_seconds: float) -> None:
        """Asks the process to end; one still there after its time to drain is killed."""
        self._stop.set()
        if self._process is None:
            return
        is_serving = self.state == "ready"
        self._signal(signal.SIGTERM)
        grace = drain_seconds + _EXIT_GRACE_SECONDS if is_serving else _STARTING_GRACE_SECONDS
        try:
            await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            self._report(f"{self.spec.name} did not stop within {grace:.0f} s; killed.")
            self.kill()

    def kill(self) -> None:
        """Ends the process and whatever it started, at once."""
        self._stop.set()
        self._signal(signal.SIGKILL)

    async def _live(self) -> int:
        self._announce_path.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            self._log_offset = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", launcher.__file__, str(os.getpid())),
                *self._command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.spec.env},
                start_new_session=True,  # the terminal's Ctrl-C reaches the supervisor only
            )
        self.pid = self._process.pid
        self._set_state("starting")
        if self._stop.is_set():  # asked for while it was being spawned
            self.kill()
        ended = asyncio.ensure_future(self._process.wait())
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait((ended, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            return await ended
        finally:
            watching.cancel()
            self._signal(signal.SIGKILL)  # helpers that outlived their leader
            await ended
            self.pid = None

    def _command(self) -> list[str]:
        command = list(self.spec.command)
        if self.spec.addresses is not None:
            return command
        command += ["--announce", str(self._announce_path), "--restarts", str(self.num_restarts)]
        for port in self.spec.ports:
            bound = self.addresses.get(port.kind)
            command += [port.flag, bound.rpartition(":")[2] if bound else str(port.number)]
        return command

    async def _watch(self) -> None:
        born = time.monotonic()
        kinds = {port.kind for port in self.spec.ports}
        while not kinds <= (announced := self._announced()).keys():
            if announced and not self.is_bound.is_set():
                self._bound(announced)
            await asyncio.sleep(_POLL_SECONDS)  # another process's file has no event to wait for
        self._bound(announced)
        await self.spec.wait_ready(announced)
        self.is_ready.set()
        self._set_state("ready")
        again = " again" if self.num_restarts else ""
        shown = ", ".join(f"{kind} {address}" for kind, address in announced.items())
        self._report(f"{self.spec.name:<11} ready{again} in {time.monotonic() - born:.1f} s: {shown}")

    def _bound(self, announced: Addresses) -> None:
        """The first address is enough to be connected to; others may be known only when start-up ends."""
        self.addresses = {**self.addresses, **announced}
        self.is_bound.set()
        self._changed()

    def _announced(self) -> Addresses:
        if self.spec.addresses is not None:
            return self.spec.addresses
        try:
            addresses: dict[str, str] = json.loads(self._announce_path.read_text())["addresses"]
        except FileNotFoundError:
            return {}
        return addresses

    def _set_state(self, state: State) -> None:
        self.state = state
        self._changed()

    def _signal(self, number: signal.Signals) -> None:
        """SIGTERM to the process itself, SIGKILL to the whole group that it leads."""
        if self.pid is None:
            return
        try:
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # it ended by itself in this moment

    def _tail(self) -> str:
        """The last lines that the latest life wrote, indented, below the log's name."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_offset)
            lines = log.read().decode(errors="replace").splitlines()
        if not lines:
            return f"  {self.log_path} has nothing of it"
        return "\n".join([f"  {self.log_path} ends:", *(f"  | {line}" for line in lines[-NUM_TAIL_LINES:])])


def _describe_exit(status: int) -> str:
    """`status` as asyncio gives it: a negative one is a signal's number."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
