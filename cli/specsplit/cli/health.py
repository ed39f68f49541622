"""`specsplit health ROLE`: whether one service can do its work now, for container engines."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import grpc

from specsplit.cli.readiness import is_grpc_ready, is_http_ready

# The gateway's gRPC is up before a verifier is connected; its HTTP API tells that apart.
_DEFAULT_ADDRESSES = {
    "gateway": "127.0.0.1:8000",
    "drafter": "127.0.0.1:50052",
    "verifier": "127.0.0.1:50053",
}
_SERVICES = {"drafter": "specsplit.v1.Drafter", "verifier": "specsplit.v1.Verifier"}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="specsplit health",
        description="The exit status is 0 if the service is ready, 1 if it is not or does not answer.",
    )
    parser.add_argument("role", choices=_DEFAULT_ADDRESSES)
    parser.add_argument(
        "--address",
        help="its gRPC, or the gateway's HTTP; by default the usual port here",
    )
    options = parser.parse_args(argv)
    address = options.address or _DEFAULT_ADDRESSES[options.role]
    is_ready = asyncio.run(_is_ready(options.role, address))
    print(f"{options.role} at {address} is {'ready' if is_ready else 'not ready'}", file=sys.stderr)
    return 0 if is_ready else 1


async def _is_ready(role: str, address: str) -> bool:
    if role == "gateway":
        return await asyncio.to_thread(is_http_ready, address, "/ready")
    try:
        return await is_grpc_ready(address, _SERVICES[role])
    except grpc.aio.AioRpcError:  # something else listens there
        return False
