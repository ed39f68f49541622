"""/metrics over HTTP, on threads, for services that have no HTTP of their own. Knows no metric."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from socketserver import ThreadingTCPServer
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, MetricsHandler

from specsplit.core.errors import Unavailable
from specsplit.core.serving import join_address

log = logging.getLogger(__name__)

SILENT_SECONDS = 5.0  # a client that neither sends nor reads for this long is hung up on
_POLL_SECONDS = 0.25  # between looks at whether to stop


class _Handler(MetricsHandler):
    timeout = SILENT_SECONDS

    def do_GET(self) -> None:
        if urlsplit(self.path).path == "/metrics":
            super().do_GET()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)


class _Server(ThreadingTCPServer):
    """A thread for each connection, so that one that hangs delays no other."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):  # those are clients that left or did not read
            log.exception("answering a scrape failed")


class _ServerV6(_Server):
    address_family = socket.AF_INET6


@contextmanager
def serve_metrics(registry: CollectorRegistry, *, host: str, port: int) -> Iterator[str]:
    """Serves while the context is open and gives the address; port 0 takes a free one."""
    server_class = _ServerV6 if ":" in host else _Server
    try:
        server = server_class((host, port), _Handler.factory(registry))
    except OSError as error:
        wanted = join_address(host, port)
        raise Unavailable(
            f"metrics_port: cannot listen on {wanted}: {error.strerror}", field="metrics_port"
        ) from error
    with server:
        threading.Thread(
            target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True
        ).start()
        try:
            yield join_address(host, int(server.server_address[1]))
        finally:
            server.shutdown()
