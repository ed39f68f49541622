"""`specsplit serve`: checks what can be checked first, then runs a stack. Knows no service."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from specsplit.cli import registry_server
from specsplit.cli.serve_settings import NO_REGISTRY, ServeSettings
from specsplit.cli.stack import Plan, bring_up
from specsplit.cli.supervisor import FolderUnusable, Supervisor
from specsplit.core.errors import SettingsError
from specsplit.core.serving import join_address
from specsplit.core.settings import exit_on_settings_error, load_settings

_PROG = "specsplit serve"


def main(argv: Sequence[str]) -> int:
    try:
        settings = load_settings(ServeSettings, argv, prog=_PROG)
        folder = (settings.dir or _fresh_folder()).absolute()
        _refuse_taken_port(settings.host, settings.port, "port")
        _refuse_taken_port(settings.host, settings.grpc_port, "grpc_port")
        program = registry_server.find_program() if settings.redis_url is None else None
    except SettingsError as error:
        exit_on_settings_error(error, prog=_PROG)
        raise AssertionError("exited") from error
    try:
        return asyncio.run(_serve(settings, folder, program))
    except FolderUnusable as error:
        print(f"{_PROG}: error: {error}", file=sys.stderr)
        return 1


async def _serve(settings: ServeSettings, folder: Path, program: Path | None) -> int:
    """`program` is the server of the stack's own registry, where it is to have one."""
    with registry_server.socket_path(folder) as path:
        registry = None if program is None else registry_server.spec(program, path)
        redis_url = registry_server.url(path) if registry else settings.redis_url
        plan = Plan(settings, folder, registry, None if redis_url == NO_REGISTRY else redis_url)
        supervisor = Supervisor(
            folder, drain_seconds=settings.drain_seconds, facts={"redis_url": plan.redis_url}
        )
        supervisor.report(f"files in {folder}")
        return await supervisor.run(partial(bring_up, supervisor, plan))


def state_folder() -> Path:
    """Where each stack that was not given a folder makes its own."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "specsplit"


def _fresh_folder() -> Path:
    return state_folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _refuse_taken_port(host: str, port: int, field: str) -> None:
    """A taken port is the user's to solve: said before a model is loaded, not by a child that keeps dying."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise SettingsError(f"host: {host}: {error.strerror}", field="host") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise SettingsError(
                f"{field}: cannot listen on {join_address(host, port)}: {error.strerror}", field=field
            ) from error
