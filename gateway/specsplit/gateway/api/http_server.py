"""One listening HTTP server inside the running event loop. Knows no routes and handles no signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that they close first


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process handles its signals itself."""
        yield


class HttpServer:
    def __init__(self, app: ASGIApp, *, host: str, port: int) -> None:
        """Port 0 takes a free one."""
        self._address = (host, port)
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            http="h11",
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None
        self.port = port

    async def start(self) -> None:
        """Binds, raising OSError when it cannot; connections are taken from then on."""
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        # asyncio turns Nagle's delay (40 ms an answer) off only on sockets that name their protocol, and
        # accepted ones inherit it; socket.create_server does not name it.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(self._address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self, *, grace_seconds: int = 1) -> None:
        """Takes no more connections, lets running requests end for `grace_seconds`, then cancels them."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = grace_seconds
        self._server.should_exit = True
        await self._serving
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)  # those cancelled
