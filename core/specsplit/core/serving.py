"""Life of a gRPC service process: listen, announce, become ready, drain on a signal, stop. Knows no service.

Health follows grpc.health.v1: the empty name is liveness and serves as soon as the port is bound; the
service's own name is readiness and serves between the end of start-up and the beginning of the drain.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from pydantic import Field

from specsplit.core.errors import SpecsplitError, Unavailable, shortened
from specsplit.core.settings import Settings

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MESSAGE_LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
# A peer that is frozen or unplugged closes no connection: only a ping that it does not answer tells. Servers
# ask too, else they would hold a stream's state for as long as the peer is silent. Of the two time-outs,
# grpcio 1.85 heeds the second one only.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
_SERVER_OPTIONS = [
    *_MESSAGE_LIMITS,
    *_KEEPALIVE,
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second listener
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
_CHANNEL_OPTIONS = [
    *_MESSAGE_LIMITS,
    *_KEEPALIVE,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    (
        "grpc.enable_http_proxy",
        0,
    ),  # services talk to each other directly, whatever a container's environment says
]


class ListenSettings(Settings):
    """Where a gRPC service listens and how it stops."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    announce: Path | None = None
    """File that receives the bound addresses as JSON once they are known."""
    drain_seconds: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Time that running work gets to finish after SIGTERM."""
    trace_file: Path | None = None
    """File that spans are appended to as OTLP JSON lines, unless OTEL_EXPORTER_OTLP_ENDPOINT is set."""
    restarts: int = Field(default=0, ge=0)
    """Times that a supervisor has started this service again; shown as a metric."""


def join_address(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel for the step path; the caller closes it."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def num_open_files() -> int:
    """File descriptors that this process holds, for leak checks; the one that lists them is not counted."""
    return len(os.listdir("/dev/fd")) - 1


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SpecsplitError) -> NoReturn:
    """Ends a call with the error's status; code and field travel as trailing metadata."""
    metadata = [("specsplit-code", error.code)]
    if error.field is not None:
        metadata.append(("specsplit-field", error.field))
    await context.abort(
        grpc.StatusCode[error.grpc_status], shortened(error.message), trailing_metadata=tuple(metadata)
    )
    raise AssertionError("abort returned")


class GrpcService:
    """One listening gRPC server with health; the addresses it bound are in `addresses`."""

    def __init__(self, name: str, settings: ListenSettings) -> None:
        self.name = name
        self.settings = settings
        self.server = grpc.aio.server(options=_SERVER_OPTIONS)
        self.addresses: dict[str, str] = {}
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    async def run(
        self,
        *,
        start: Callable[[], Awaitable[None]],
        drain: Callable[[], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        """Serves until SIGTERM or SIGINT.

        `start` makes the service ready (it may load a model; a signal cancels it), `drain` returns when
        running work has ended and is cut after `drain_seconds`, `close` frees everything and always runs
        once `start` was called.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await self._health.set(self.name, health_pb2.HealthCheckResponse.NOT_SERVING)
        wanted = join_address(self.settings.host, self.settings.port)
        try:
            port = self.server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {wanted}: {error}", field="port") from error
        await self.server.start()
        self.addresses["grpc"] = join_address(self.settings.host, port)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        stopping = asyncio.ensure_future(stop.wait())
        starting = asyncio.ensure_future(start())
        try:
            self._announce()
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # a failed start ends the process loudly
                self._announce()  # `start` may have bound further addresses
                await self._health.set(self.name, health_pb2.HealthCheckResponse.SERVING)
                log.info("%s ready at %s", self.name, self.addresses)
                await stopping
                log.info("%s draining", self.name)
                await self._health.set(self.name, health_pb2.HealthCheckResponse.NOT_SERVING)
                try:
                    await asyncio.wait_for(drain(), self.settings.drain_seconds)
                except TimeoutError:
                    log.warning("%s: work still running after %s s", self.name, self.settings.drain_seconds)
        finally:
            starting.cancel()
            stopping.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)
            await close()
            await self.server.stop(grace=0.5)
            log.info("%s stopped", self.name)

    def _announce(self) -> None:
        if self.settings.announce is None:
            return
        temporary = self.settings.announce.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"pid": os.getpid(), "addresses": self.addresses}))
        temporary.replace(self.settings.announce)
