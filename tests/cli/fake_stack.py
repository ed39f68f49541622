"""A supervisor over two fake services, the second started with the first one's address. Run by the tests.

python fake_stack.py DIR [--first FLAG]... [--second FLAG]... [--with-registry]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from specsplit.cli import registry_server
from specsplit.cli.child import Addresses, Port, ServiceSpec
from specsplit.cli.readiness import wait_grpc_ready
from specsplit.cli.supervisor import Supervisor


async def wait_ready(addresses: Addresses) -> None:
    await wait_grpc_ready(addresses["grpc"], "test.Service")


def spec(role: str, flags: list[str]) -> ServiceSpec:
    return ServiceSpec(
        role=role,
        index=0,
        command=(sys.executable, str(Path(__file__).with_name("fake_service.py")), "test.Service", *flags),
        ports=(Port("grpc", "--port"),),
        wait_ready=wait_ready,
        env={},
    )


async def bring_up(supervisor: Supervisor, options: argparse.Namespace) -> None:
    if options.with_registry:
        supervisor.start(registry_server.spec(registry_server.find_program(), options.dir / "redis.sock"))
    first = supervisor.start(spec("first", options.first))
    await first.is_bound.wait()
    supervisor.start(spec("second", options.second))
    for child in supervisor.children:
        await child.is_ready.wait()
    supervisor.report("all ready")


async def run(options: argparse.Namespace) -> int:
    supervisor = Supervisor(options.dir, drain_seconds=options.drain_seconds, facts={})
    return await supervisor.run(partial(bring_up, supervisor, options))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--first", action="append", default=[])
    parser.add_argument("--second", action="append", default=[])
    parser.add_argument("--with-registry", action="store_true")
    parser.add_argument("--drain-seconds", type=float, default=5.0)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
