"""The services of one stack: which processes, with which flags, in which order. Knows only their flags."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specsplit.cli import launcher
from specsplit.cli.child import Addresses, Child, Port, ServiceSpec, StartFailed
from specsplit.cli.readiness import wait_grpc_ready, wait_http_ready
from specsplit.cli.serve_settings import ServeSettings
from specsplit.cli.supervisor import Supervisor

TRACE_FILE = "traces.jsonl"
_PYTHON = (sys.executable, "-P")  # nothing in the working directory is imported by accident
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
_METRICS_PORT = Port("metrics", "--metrics-port")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stack is to be; `registry` is the server to run for it, `redis_url` whichever it uses."""

    settings: ServeSettings
    folder: Path
    registry: ServiceSpec | None
    redis_url: str | None


async def bring_up(supervisor: Supervisor, plan: Plan) -> None:
    """Starts all services; returns when all are ready."""
    if plan.registry is not None:
        supervisor.start(plan.registry)
    tokenizer = await _resolve_model(plan)
    drafter = supervisor.start(_drafter_spec(plan))
    verifiers = [supervisor.start(_verifier_spec(plan, index)) for index in range(plan.settings.verifiers)]
    for child in (drafter, *verifiers):
        await child.is_bound.wait()
    gateway = supervisor.start(_gateway_spec(plan, tokenizer, drafter, verifiers))
    for child in supervisor.children:
        await child.is_ready.wait()
    name = _model_name(plan.settings.model)
    supervisor.report(f"serving {name} at http://{gateway.addresses['http']}  (Ctrl-C stops)")


def _drafter_spec(plan: Plan) -> ServiceSpec:
    return ServiceSpec(
        role="drafter",
        index=0,
        command=_command(plan, "drafter", proposer=plan.settings.drafter),
        ports=(Port("grpc", "--port"), _METRICS_PORT),
        wait_ready=partial(_wait_grpc_ready, "specsplit.v1.Drafter"),
        env=_ONE_THREAD,
    )


def _verifier_spec(plan: Plan, index: int) -> ServiceSpec:
    settings = plan.settings
    command = _command(
        plan,
        "verifier",
        model=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=settings.device,
        num_blocks=settings.num_blocks,
        max_sequence_tokens=settings.max_sequence_tokens,
        threads=settings.threads or _threads_of_each(settings.verifiers),
        verifiers_here=settings.verifiers,
        redis_url=plan.redis_url,
    )
    return ServiceSpec(
        role="verifier",
        index=index,
        command=command,
        ports=(Port("grpc", "--port"), _METRICS_PORT),
        wait_ready=partial(_wait_grpc_ready, "specsplit.v1.Verifier"),
        env={},  # the engine sets its own threading
    )


def _threads_of_each(num_verifiers: int) -> int | None:
    """None leaves a single verifier its own default."""
    if num_verifiers == 1:
        return None
    cores = int((os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))).split(",")[0])
    return max(1, cores // num_verifiers)


def _gateway_spec(plan: Plan, tokenizer: Path, drafter: Child, verifiers: Sequence[Child]) -> ServiceSpec:
    settings = plan.settings
    command = _command(
        plan,
        "gateway",
        host=settings.host,
        drafter=drafter.addresses["grpc"],
        verifiers=",".join(verifier.addresses["grpc"] for verifier in verifiers),
        tokenizer=tokenizer,
        model_name=_model_name(settings.model),
        speculation_k=settings.speculation_k,
        redis_url=plan.redis_url,
        trace_ratio=settings.trace_ratio,
    )
    if settings.trace_content:
        command += ("--trace-content",)
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


def _command(plan: Plan, role: str, **flags: object) -> tuple[str, ...]:
    """The role's command line; a flag that is None keeps the service's own default."""
    flags |= {"trace_file": plan.folder / TRACE_FILE, "drain_seconds": plan.settings.drain_seconds}
    command = [*_PYTHON, "-m", "specsplit.cli", role]
    for name, value in flags.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(command)


async def _resolve_model(plan: Plan) -> Path:
    """Gets the model's files onto this machine; returns the folder of its tokenizer."""
    model, folder = plan.settings.model, plan.folder
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", launcher.__file__, str(os.getpid())),
        *(*_PYTHON, "-m", "specsplit.cli.resolve_model"),
        *(model, plan.settings.revision or "", str(folder)),
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
        raise StartFailed(f"the model {model} is not available")
    return folder / "tokenizer"


def _model_name(model: str) -> str:
    """A hub or bundled name as given, the last part of a path."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model
