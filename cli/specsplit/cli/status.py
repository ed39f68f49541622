"""`specsplit status`: what the services of a running stack and its registry say of themselves; read only."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import redis

from specsplit.cli import registry_server
from specsplit.cli.serve import state_folder
from specsplit.cli.status_tables import Registry, Service, show
from specsplit.core.codec.common import stats_from_pb
from specsplit.core.registry.overview import read_replicas
from specsplit.core.registry.url import checked
from specsplit.core.registry.writer import connect
from specsplit.core.serving import open_channel
from specsplit.v1 import common_pb2, drafter_pb2_grpc, gateway_pb2_grpc, verifier_pb2_grpc

_STUBS: dict[str, Any] = {
    "drafter": drafter_pb2_grpc.DrafterStub,
    "verifier": verifier_pb2_grpc.VerifierStub,
    "gateway": gateway_pb2_grpc.GatewayStub,
}
_ANSWER_SECONDS = 2.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="specsplit status",
        description="Shows the services of the newest stack, of the one in --dir, or at the addresses given, "
        "and their registry. The exit status is 0 if all of them answer.",
    )
    parser.add_argument("--dir", type=Path, help="folder of `specsplit serve`, with its stack.json")
    for role in _STUBS:
        parser.add_argument(
            f"--{role}", action="append", default=[], metavar="ADDRESS", help=f"a {role}'s gRPC"
        )
    parser.add_argument("--redis-url", metavar="URL", help="the registry; by default the stack's own")
    options = parser.parse_args(argv)
    services = [
        Service(f"{role}-{index}", role, address)
        for role in _STUBS
        for index, address in enumerate(getattr(options, role))
    ]
    redis_url: str | None = None
    if options.redis_url is not None:
        try:
            checked(options.redis_url)
        except ValueError as error:
            parser.error(f"--redis-url: {error}")
    try:
        if not services and (options.dir or not options.redis_url):
            services, redis_url = _read_stack(options.dir or _newest_folder())
        return asyncio.run(_status(services, options.redis_url or redis_url))
    except FileNotFoundError as error:
        print(f"specsplit status: error: {error}", file=sys.stderr)
        return 1


def _newest_folder() -> Path:
    stacks = sorted(state_folder().glob("*/stack.json"), key=lambda path: path.stat().st_mtime)
    if not stacks:
        raise FileNotFoundError(f"no stack under {state_folder()}; `specsplit serve` starts one")
    return stacks[-1].parent


def _read_stack(folder: Path) -> tuple[list[Service], str | None]:
    """Its services and the URL of its registry."""
    path = folder / "stack.json"
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    stack = json.loads(path.read_text())
    services = [
        Service(
            name=f"{child['role']}-{child['index']}",
            role=child["role"],
            address=child["addresses"].get("grpc") or child["addresses"].get("unix"),
            pid=str(child["pid"] or ""),
            state=child["state"],
            restarts=str(child["restarts"]),
        )
        for child in stack["children"]
    ]
    return services, stack["redis_url"]


async def _status(services: Sequence[Service], redis_url: str | None) -> int:
    asking = asyncio.gather(*(_ask(service) for service in services))
    registry = None if redis_url is None else await asyncio.to_thread(_read_registry, redis_url)
    counters = await asking
    show(services, counters, registry)
    is_registry_away = registry is not None and registry.replicas is None
    return int(is_registry_away or any(counted is None for counted in counters))


async def _ask(service: Service) -> dict[str, int] | None:
    """The service's counters; None if it does not answer."""
    if service.address is None:
        return None
    if service.role == "redis":
        return await asyncio.to_thread(_ask_redis, registry_server.url(Path(service.address)))
    async with open_channel(service.address) as channel:
        stub = _STUBS[service.role](channel)
        try:
            return stats_from_pb(await stub.Stats(common_pb2.StatsRequest(), timeout=_ANSWER_SECONDS))
        except grpc.aio.AioRpcError:
            return None


def _ask_redis(url: str) -> dict[str, int] | None:
    with connect(url, timeout_seconds=_ANSWER_SECONDS) as client:
        try:
            found: Any = client.info()
        except redis.RedisError:
            return None
    return {name: found[name] for name in ("used_memory", "connected_clients")}


def _read_registry(url: str) -> Registry:
    with connect(url, timeout_seconds=_ANSWER_SECONDS) as client:
        try:
            return Registry(read_replicas(client))
        except redis.RedisError as error:
            return Registry(None, error=str(error))
