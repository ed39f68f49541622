"""`specsplit status`: the services of a running stack and their counters, as tables. Changes nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from specsplit.cli.serve import state_folder
from specsplit.core.codec.common import stats_from_pb
from specsplit.core.serving import open_channel
from specsplit.v1 import common_pb2, drafter_pb2_grpc, gateway_pb2_grpc, verifier_pb2_grpc

_STUBS: dict[str, Any] = {
    "drafter": drafter_pb2_grpc.DrafterStub,
    "verifier": verifier_pb2_grpc.VerifierStub,
    "gateway": gateway_pb2_grpc.GatewayStub,
}
_ANSWER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Service:
    """A service to ask: where it is and what the supervisor, if there is one, says of it."""

    name: str
    role: str
    address: str | None
    pid: str = ""
    state: str = ""
    restarts: str = ""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="specsplit status",
        description="Shows the services of the newest stack, of the one in --dir, or at the addresses given. "
        "The exit status is 0 if all of them answer.",
    )
    parser.add_argument("--dir", type=Path, help="folder of `specsplit serve`, with its stack.json")
    for role in _STUBS:
        parser.add_argument(
            f"--{role}", action="append", default=[], metavar="ADDRESS", help=f"a {role}'s gRPC"
        )
    options = parser.parse_args(argv)
    services = [
        Service(f"{role}-{index}", role, address)
        for role in _STUBS
        for index, address in enumerate(getattr(options, role))
    ]
    if not services:
        try:
            services = _read_stack(options.dir or _newest_folder())
        except FileNotFoundError as error:
            print(f"specsplit status: error: {error}", file=sys.stderr)
            return 1
    counters = asyncio.run(_ask_all(services))
    _show(services, counters)
    return 0 if all(counted is not None for counted in counters) else 1


def _newest_folder() -> Path:
    stacks = sorted(state_folder().glob("*/stack.json"), key=lambda path: path.stat().st_mtime)
    if not stacks:
        raise FileNotFoundError(f"no stack under {state_folder()}; `specsplit serve` starts one")
    return stacks[-1].parent


def _read_stack(folder: Path) -> list[Service]:
    path = folder / "stack.json"
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    return [
        Service(
            name=f"{child['role']}-{child['index']}",
            role=child["role"],
            address=child["addresses"].get("grpc"),
            pid=str(child["pid"] or ""),
            state=child["state"],
            restarts=str(child["restarts"]),
        )
        for child in json.loads(path.read_text())["children"]
    ]


async def _ask_all(services: Sequence[Service]) -> list[dict[str, int] | None]:
    return await asyncio.gather(*(_ask(service) for service in services))


async def _ask(service: Service) -> dict[str, int] | None:
    """The service's counters; None if it does not answer."""
    if service.address is None:
        return None
    async with open_channel(service.address) as channel:
        stub = _STUBS[service.role](channel)
        try:
            return stats_from_pb(await stub.Stats(common_pb2.StatsRequest(), timeout=_ANSWER_SECONDS))
        except grpc.aio.AioRpcError:
            return None


def _show(services: Sequence[Service], counters: Sequence[dict[str, int] | None]) -> None:
    table = Table("service", "pid", "state", "restarts", "address", "counters")
    for service, counted in zip(services, counters, strict=True):
        shown = (
            "no answer"
            if counted is None
            else ", ".join(f"{name} {value}" for name, value in counted.items())
        )
        table.add_row(
            service.name, service.pid, service.state, service.restarts, service.address or "", shown
        )
    Console().print(table)
