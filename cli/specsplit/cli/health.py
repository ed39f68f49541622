"""`specsplit health ROLE`: whether one service can do its work now, for container engines. Knows no stack.

Engines ask every few seconds: what is slow to import stays out.
"""

from __future__ import annotations

import argparse
import http.client
import sys
from collections.abc import Sequence
from typing import Any

# The gateway's gRPC is up before a verifier is connected; its HTTP API tells that apart.
DEFAULT_ADDRESSES = {
    "gateway": "127.0.0.1:8000",
    "drafter": "127.0.0.1:50052",
    "verifier": "127.0.0.1:50053",
}
_SERVICES = {"drafter": "specsplit.v1.Drafter", "verifier": "specsplit.v1.Verifier"}
_ANSWER_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="specsplit health",
        description="The exit status is 0 if the service is ready, 1 if it is not or does not answer.",
    )
    parser.add_argument("role", choices=DEFAULT_ADDRESSES)
    parser.add_argument("--address", help="its gRPC, or the gateway's HTTP; by default the usual port here")
    options = parser.parse_args(argv)
    address = options.address or DEFAULT_ADDRESSES[options.role]
    if options.role == "gateway":
        is_ready = _is_http_ready(address)
    else:
        is_ready = _is_grpc_ready(address, _SERVICES[options.role])
    print(f"{options.role} at {address} is {'ready' if is_ready else 'not ready'}", file=sys.stderr)
    return 0 if is_ready else 1


def _is_http_ready(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _is_grpc_ready(address: str, service: str) -> bool:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_ANSWER_SECONDS)
        except grpc.RpcError:  # nobody listens there, or something else does
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
