"""`specsplit serve`: a drafter, a verifier and a gateway on this machine. Knows only their flags."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specsplit.cli import launcher
from specsplit.cli.child import Addresses, Child, Port, ServiceSpec, StartFailed
from specsplit.cli.readiness import wait_grpc_ready, wait_http_ready
from specsplit.cli.supervisor import FolderInUse, Supervisor
from specsplit.core.errors import SettingsError
from specsplit.core.settings import Settings, exit_on_settings_error, load_settings
from specsplit.core.types import MAX_DRAFT

_PROG = "specsplit serve"
_PYTHON = (sys.executable, "-P")  # nothing in the working directory is imported by accident
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


class ServeSettings(Settings):
    """Runs an n-gram drafter, a verifier and a gateway on this machine until Ctrl-C."""

    model_config = SettingsConfigDict(env_prefix="SPECSPLIT_SERVE_")

    model: str = "smollm2-135m-instruct"
    """Model to serve: the bundled one's name, a hub name, a folder, or a GGUF file."""
    revision: str | None = None
    """Revision of a hub model."""
    drafter: Literal["ngram"] = "ngram"
    """Proposer of drafts."""
    speculation_k: int = Field(default=4, ge=0, le=MAX_DRAFT)
    """Draft tokens per step for requests that do not say."""
    host: str = "127.0.0.1"
    """Address on which the gateway listens; drafter and verifier listen on the loopback only."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the HTTP API; 0 takes a free one."""
    grpc_port: int = Field(default=50051, ge=0, le=65535)
    """Port of the gateway's gRPC API; 0 takes a free one."""
    dir: Path | None = None
    """Folder for stack.json and logs; by default a fresh one under $XDG_STATE_HOME/specsplit."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of the verifier; by default the cores."""
    dtype: str | None = None
    """Type of the weights; by default the verifier's choice for the device."""
    device: str | None = None
    """Where the model runs: auto, cpu or cuda."""
    num_blocks: int | None = Field(default=None, ge=1)
    """KV blocks; by default sized from the memory that is free."""
    max_sequence_tokens: int | None = Field(default=None, ge=1)
    """Longest sequence, prompt and output together; by default the model's context length."""
    drain_seconds: float = Field(default=10.0, ge=0)
    """Time that running requests get to finish after Ctrl-C."""


def main(argv: Sequence[str]) -> int:
    try:
        settings = load_settings(ServeSettings, argv, prog=_PROG)
        folder = settings.dir or _fresh_folder()
        _refuse_taken_port(settings.host, settings.port, "port")
        _refuse_taken_port(settings.host, settings.grpc_port, "grpc_port")
    except SettingsError as error:
        exit_on_settings_error(error, prog=_PROG)
        raise AssertionError("exited") from error
    try:
        return asyncio.run(_serve(settings, folder.absolute()))
    except FolderInUse as error:
        print(f"{_PROG}: error: {error}", file=sys.stderr)
        return 1


async def _serve(settings: ServeSettings, folder: Path) -> int:
    supervisor = Supervisor(folder, drain_seconds=settings.drain_seconds)
    supervisor.report(f"files in {folder}")
    return await supervisor.run(partial(_bring_up, supervisor, settings, folder))


async def _bring_up(supervisor: Supervisor, settings: ServeSettings, folder: Path) -> None:
    tokenizer = await _resolve_model(settings, folder)
    drafter = supervisor.start(_drafter_spec(settings))
    verifier = supervisor.start(_verifier_spec(settings))
    await drafter.is_bound.wait()
    await verifier.is_bound.wait()
    gateway = supervisor.start(_gateway_spec(settings, tokenizer, drafter, verifier))
    for child in (drafter, verifier, gateway):
        await child.is_ready.wait()
    supervisor.report(
        f"serving {_model_name(settings.model)} at http://{gateway.addresses['http']}  (Ctrl-C stops)"
    )


def _drafter_spec(settings: ServeSettings) -> ServiceSpec:
    return ServiceSpec(
        role="drafter",
        index=0,
        command=_command("drafter", proposer=settings.drafter, drain_seconds=settings.drain_seconds),
        ports=(Port("grpc", "--port"),),
        wait_ready=partial(_wait_grpc_ready, "specsplit.v1.Drafter"),
        env=_ONE_THREAD,
    )


def _verifier_spec(settings: ServeSettings) -> ServiceSpec:
    command = _command(
        "verifier",
        model=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=settings.device,
        num_blocks=settings.num_blocks,
        max_sequence_tokens=settings.max_sequence_tokens,
        threads=settings.threads,
        drain_seconds=settings.drain_seconds,
    )
    return ServiceSpec(
        role="verifier",
        index=0,
        command=command,
        ports=(Port("grpc", "--port"),),
        wait_ready=partial(_wait_grpc_ready, "specsplit.v1.Verifier"),
        env={},  # the engine sets its own threading
    )


def _gateway_spec(settings: ServeSettings, tokenizer: Path, drafter: Child, verifier: Child) -> ServiceSpec:
    command = _command(
        "gateway",
        host=settings.host,
        drafter=drafter.addresses["grpc"],
        verifier=verifier.addresses["grpc"],
        tokenizer=tokenizer,
        model_name=_model_name(settings.model),
        speculation_k=settings.speculation_k,
        drain_seconds=settings.drain_seconds,
    )
    return ServiceSpec(
        role="gateway",
        index=0,
        command=command,
        ports=(Port("grpc", "--port", settings.grpc_port), Port("http", "--http-port", settings.port)),
        wait_ready=_wait_gateway_ready,
        env=_ONE_THREAD,
    )


async def _wait_grpc_ready(service: str, addresses: Addresses) -> None:
    await wait_grpc_ready(addresses["grpc"], service)


async def _wait_gateway_ready(addresses: Addresses) -> None:
    await wait_http_ready(addresses["http"], "/ready")


def _command(role: str, **flags: object) -> tuple[str, ...]:
    """The role's command line; a flag that is None keeps the service's own default."""
    command = [*_PYTHON, "-m", "specsplit.cli", role]
    for name, value in flags.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(command)


async def _resolve_model(settings: ServeSettings, folder: Path) -> Path:
    """Gets the model's files onto this machine; returns the folder of its tokenizer."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", launcher.__file__, str(os.getpid())),
        *(*_PYTHON, "-m", "specsplit.cli.resolve_model"),
        *(settings.model, settings.revision or "", str(folder)),
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if status != 0:
        raise StartFailed(f"the model {settings.model} is not available")
    found: dict[str, str] = json.loads((folder / "model.json").read_text())
    return Path(found["tokenizer"])


def _model_name(model: str) -> str:
    """A hub or bundled name as given, the last part of a path."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model


def state_folder() -> Path:
    """Where each stack that was not given a folder makes its own."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "specsplit"


def _fresh_folder() -> Path:
    return state_folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _refuse_taken_port(host: str, port: int, field: str) -> None:
    """A taken port is the user's to solve: said before a model is loaded, not by a child that keeps dying."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise SettingsError(
                f"{field}: cannot listen on {host}:{port}: {error.strerror}", field=field
            ) from error
