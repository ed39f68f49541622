"""Waits until a service says that it is ready, over gRPC, HTTP or Redis' protocol. Knows no service's API.

It asks again and again: a service that is not up yet cannot be waited for in any other way.
"""

from __future__ import annotations

import asyncio
import http.client
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsplit.core.serving import open_channel

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 2.0
_NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def wait_grpc_ready(address: str, service: str) -> None:
    """Returns once grpc.health.v1 reports `service` as serving; a service unknown there raises."""
    async with open_channel(address) as channel:
        while not await _is_grpc_ready(channel, service):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)


async def _is_grpc_ready(channel: grpc.aio.Channel, service: str) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_ANSWER_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() in _NOT_YET:
            return False
        raise
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def wait_redis_ready(socket: Path) -> None:
    """Returns once the server at that unix socket answers a PING."""
    while not await _is_redis_ready(socket):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)


async def _is_redis_ready(socket: Path) -> bool:
    """Two lines of its protocol: the client library takes 0.4 s to import, the server 0.1 s to start."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
            finally:
                writer.close()
    except OSError:  # TimeoutError is one
        return False


async def wait_http_ready(address: str, path: str) -> None:
    """Returns once a GET of `path` is answered with 200."""
    while await asyncio.to_thread(_http_status, address, path) != 200:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)


def _http_status(address: str, path: str) -> int | None:
    connection = http.client.HTTPConnection(address, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
