"""Several supervised services, their stop on a signal and the file that names them. Knows no role.

A first SIGINT, SIGTERM or SIGHUP stops the children in reverse order of their start, a second one kills them.
A supervisor that is itself killed takes its children along: each has the kernel's parent-death signal.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from itertools import groupby
from pathlib import Path

from specsplit.cli.child import Child, ServiceSpec, StartFailed

EXIT_FAILED = 1
EXIT_FORCED = 130


class FolderUnusable(Exception):
    """The folder cannot be made or written, or another supervisor lives in it."""


class Supervisor:
    """Runs services in `folder`: `stack.json`, logs and the services' announcements lie there.

    `facts` go into `stack.json` as they are.
    """

    def __init__(self, folder: Path, *, drain_seconds: float, facts: Mapping[str, object]) -> None:
        self.children: list[Child] = []
        self._facts = facts
        self._folder = folder
        self._drain_seconds = drain_seconds
        self._running: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._is_forced = False
        self._failures: list[BaseException] = []  # the first one counts
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
        except OSError as error:
            raise FolderUnusable(f"dir: {folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderUnusable(f"{folder} is in use by another supervisor") from None

    def start(self, spec: ServiceSpec) -> Child:
        """Starts a service and keeps it running."""
        child = Child(spec, self._folder, report=self.report, changed=self._write_stack)
        self.children.append(child)
        running = asyncio.create_task(child.run(), name=spec.name)
        running.add_done_callback(self._on_end)
        self._running.append(running)
        return child

    def report(self, line: str) -> None:
        """Shows a line on the terminal."""
        print(line, flush=True)

    async def run(self, bring_up: Callable[[], Coroutine[object, object, None]]) -> int:
        """Runs `bring_up`, which starts the services, then waits for a signal; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        self._write_stack()
        starting = asyncio.create_task(bring_up())
        starting.add_done_callback(self._on_end)
        await self._stop.wait()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if not self._failures:
            self.report("stopping (Ctrl-C again kills)")
        elif isinstance(self._failures[0], StartFailed):
            print(self._failures[0], file=sys.stderr, flush=True)
        await self._stop_children()
        if not self._failures:
            return EXIT_FORCED if self._is_forced else 0
        if isinstance(self._failures[0], StartFailed):
            return EXIT_FAILED
        raise self._failures[0]

    async def _stop_children(self) -> None:
        """The last started role first; the replicas of a role together."""
        started = reversed(list(zip(self.children, self._running, strict=True)))
        for _, replicas in groupby(started, key=lambda entry: entry[0].spec.role):
            await asyncio.gather(*(self._stop_child(child, running) for child, running in replicas))

    async def _stop_child(self, child: Child, running: asyncio.Task[None]) -> None:
        await child.stop(self._drain_seconds)
        await asyncio.gather(running, return_exceptions=True)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failures.append(failure)
            self._stop.set()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._is_forced = True
            for child in self.children:
                child.kill()
        self._stop.set()

    def _write_stack(self) -> None:
        stack = {
            **self._facts,
            "pid": os.getpid(),
            "children": [
                {
                    "role": child.spec.role,
                    "index": child.spec.index,
                    "pid": child.pid,
                    "addresses": child.addresses,
                    "restarts": child.num_restarts,
                    "state": child.state,
                }
                for child in self.children
            ],
        }
        path = self._folder / "stack.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(stack, indent=2) + "\n")
        temporary.replace(path)
