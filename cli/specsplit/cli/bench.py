"""`specsplit bench`: decode speed against transformers, speculation on and off, the gateway's own time.

Everything runs in one invocation and interleaved, so that ratios hold on a noisy machine.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from rich.console import Console
from rich.table import Table

from specsplit.cli.bench_prompts import COPY_HEAVY, FREE
from specsplit.core.codec import common as common_codec
from specsplit.core.codec import gateway as gateway_codec
from specsplit.core.errors import SettingsError
from specsplit.core.settings import Settings, exit_on_settings_error, load_settings
from specsplit.core.types import ChatMessage, Delta, Finished, GenerateRequest, Speculation, Usage
from specsplit.v1 import common_pb2, gateway_pb2_grpc

PROG = "specsplit bench"
START_SECONDS = 300.0


class BenchSettings(Settings):
    """Measures this machine; starts its own services and stops them."""

    model_config = SettingsConfigDict(env_prefix="SPECSPLIT_BENCH_")

    model: str = "smollm2-135m-instruct"
    """Model to serve."""
    threads: int = Field(default=2, ge=1)
    """Threads of the verifier and of transformers."""
    tokens: int = Field(default=64, ge=16)
    """Output tokens per request."""
    rounds: int = Field(default=2, ge=1)
    """Times that each prompt is measured."""
    k: int = Field(default=4, ge=1)
    """Draft tokens per step with speculation on."""
    streams: int = Field(default=32, ge=2)
    """Concurrent requests for the gateway's time per step."""
    json_file: Path | None = None
    """Also write the figures here as JSON."""


@dataclass(frozen=True, slots=True)
class Run:
    """One request: seconds from the first to the last token, and tokens in that time."""

    seconds: float
    num_tokens: int
    usage: Usage | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class StepTime:
    """Means per step over a phase, in microseconds."""

    rows: float
    gateway_us: float
    verifier_idle_us: float
    forward_us: float
    sample_us: float


def main(argv: Sequence[str]) -> None:
    try:
        settings = load_settings(BenchSettings, argv, prog=PROG)
    except SettingsError as error:
        exit_on_settings_error(error, prog=PROG)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        server = _start(settings, Path(folder))
        try:
            address = _wait_ready(Path(folder), server)
            baseline = _transformers_baseline(settings)
            figures = asyncio.run(_measure(settings, address, baseline, console))
        finally:
            server.terminate()
            server.wait(60)
    _print(figures, settings, console)
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(figures, indent=2))


def _start(settings: BenchSettings, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "specsplit.cli", "serve", "--port", "0", "--grpc-port", "0"),
            *("--model", settings.model, "--threads", str(settings.threads), "--dir", str(folder)),
        ],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_ready(folder: Path, server: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        stack = folder / "stack.json"
        if stack.exists():
            children = json.loads(stack.read_text())["children"]
            gateways = [child for child in children if child["role"] == "gateway"]  # the last to be started
            if gateways and all(child["state"] == "ready" for child in children):
                return str(gateways[0]["addresses"]["grpc"])
        time.sleep(0.1)
    raise SystemExit(f"{PROG}: the services did not become ready")


def _transformers_baseline(settings: BenchSettings) -> Callable[[Sequence[int]], Run]:
    """Greedy `generate` of the same weights in this process, timed token by token."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    from specsplit.engine.bundled import resolve_model_path

    torch.set_num_threads(settings.threads)
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model_path(settings.model), dtype=torch.float32
    ).eval()

    class Clock(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(prompt_ids: Sequence[int]) -> Run:
        clock = Clock()
        ids = torch.tensor([list(prompt_ids)])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=settings.tokens,
                max_new_tokens=settings.tokens,
                streamer=clock,
                pad_token_id=0,
            )
        times = clock.times[1:]  # the streamer is given the prompt first
        return Run(times[-1] - times[0], len(times) - 1)

    return run


async def _measure(
    settings: BenchSettings, address: str, baseline: Callable[[Sequence[int]], Run], console: Console
) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)

        async def ours(prompt: str, *, k: int) -> tuple[Run, list[int]]:
            return await _timed(stub, prompt, settings.tokens, k)

        await ours(FREE[0], k=0)  # warm up
        against: dict[str, list[float]] = {"ours": [], "transformers": []}
        for round_ in range(settings.rounds):
            for prompt in FREE:
                run, prompt_ids = await ours(prompt, k=0)
                against["ours"].append(run.tokens_per_second)
                against["transformers"].append(baseline(prompt_ids).tokens_per_second)
            console.print(f"k=0 against transformers: round {round_ + 1} of {settings.rounds}")
        speculation: dict[str, list[float]] = {"off": [], "on": [], "tokens_per_step": [], "acceptance": []}
        for round_ in range(settings.rounds):
            for prompt in COPY_HEAVY:
                off, _ = await ours(prompt, k=0)
                on, _ = await ours(prompt, k=settings.k)
                assert on.usage is not None
                speculation["off"].append(off.tokens_per_second)
                speculation["on"].append(on.tokens_per_second)
                speculation["tokens_per_step"].append(on.usage.completion_tokens / on.usage.steps)
                speculation["acceptance"].append(on.usage.accepted / max(on.usage.drafted, 1))
            console.print(f"speculation on copy-heavy prompts: round {round_ + 1} of {settings.rounds}")
        steps = [await _step_time(stub, settings, num) for num in (1, settings.streams)]
    return {
        "k0_tokens_per_second": statistics.median(against["ours"]),
        "transformers_tokens_per_second": statistics.median(against["transformers"]),
        "k0_over_transformers": _median_ratio(against["ours"], against["transformers"]),
        "copy_k0_tokens_per_second": statistics.median(speculation["off"]),
        "copy_speculative_tokens_per_second": statistics.median(speculation["on"]),
        "copy_speedup": _median_ratio(speculation["on"], speculation["off"]),
        "copy_tokens_per_step": statistics.mean(speculation["tokens_per_step"]),
        "copy_acceptance": statistics.mean(speculation["acceptance"]),
        "steps": [asdict(step) for step in steps],
    }


def _median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


async def _timed(
    stub: gateway_pb2_grpc.GatewayAsyncStub,
    prompt: str,
    num_tokens: int,
    k: int,
    *,
    on_first: Callable[[], None] = lambda: None,
) -> tuple[Run, list[int]]:
    """One greedy request of exactly `num_tokens` tokens; the first delta starts the clock."""
    request = GenerateRequest(
        prompt=(ChatMessage("user", prompt),),
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        speculation=Speculation(k=k),
    )
    first = last = 0.0
    num_first = num_total = 0
    usage: Usage | None = None
    prompt_ids: list[int] = []
    async for message in stub.Generate(gateway_codec.generate_request_to_pb(request)):
        event = gateway_codec.event_from_pb(message)
        if isinstance(event, Delta):
            last = time.perf_counter()
            if not first:
                first, num_first = last, len(event.ids)
                on_first()
            num_total += len(event.ids)
        elif isinstance(event, Finished):
            usage = event.usage
        else:
            prompt_ids = list(event.prompt_ids)
    return Run(last - first, num_total - num_first, usage), prompt_ids


async def _step_time(
    stub: gateway_pb2_grpc.GatewayAsyncStub, settings: BenchSettings, num_streams: int
) -> StepTime:
    """Means over the steps in which all of `num_streams` requests decode, drafts on."""
    num_waiting = num_streams
    all_decode = asyncio.Event()

    def on_first() -> None:
        nonlocal num_waiting
        num_waiting -= 1
        if num_waiting == 0:
            all_decode.set()

    streams = [
        asyncio.ensure_future(
            _timed(stub, FREE[i % len(FREE)], 4 * settings.tokens, settings.k, on_first=on_first)
        )
        for i in range(num_streams)
    ]
    await all_decode.wait()
    before = await _counters(stub)
    after = before
    while after["steps"] - before["steps"] < settings.tokens // 2:
        if any(stream.done() for stream in streams):
            raise SystemExit(f"{PROG}: a stream ended before enough steps were seen; raise --tokens")
        await asyncio.sleep(0.2)
        after = await _counters(stub)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)

    def grown(name: str) -> int:
        return after[name] - before.get(name, 0)

    num_steps = grown("steps")
    return StepTime(
        rows=grown("step_rows") / num_steps,
        gateway_us=(grown("own_ns") / 1000 + grown("codec_us")) / num_steps,
        verifier_idle_us=grown("verifier_idle_us") / num_steps,
        forward_us=grown("verifier_forward_us") / num_steps,
        sample_us=grown("verifier_sample_us") / num_steps,
    )


async def _counters(stub: gateway_pb2_grpc.GatewayAsyncStub) -> dict[str, int]:
    return common_codec.stats_from_pb(await stub.Stats(common_pb2.StatsRequest(), timeout=20))


def _print(figures: dict[str, Any], settings: BenchSettings, console: Console) -> None:
    table = Table(title=f"{settings.model}, {settings.threads} threads, fp32, one stream, medians")
    table.add_column("decode, tokens/s")
    table.add_column("baseline", justify="right")
    table.add_column("specsplit", justify="right")
    table.add_column("ratio", justify="right")
    table.add_row(
        "k: 0 against transformers.generate",
        f"{figures['transformers_tokens_per_second']:.1f}",
        f"{figures['k0_tokens_per_second']:.1f}",
        f"{figures['k0_over_transformers']:.2f}",
    )
    table.add_row(
        f"copy-heavy, k: {settings.k} against our k: 0",
        f"{figures['copy_k0_tokens_per_second']:.1f}",
        f"{figures['copy_speculative_tokens_per_second']:.1f}",
        f"{figures['copy_speedup']:.2f}",
    )
    console.print(table)
    console.print(
        f"copy-heavy: {figures['copy_tokens_per_step']:.2f} tokens per step, "
        f"{figures['copy_acceptance']:.0%} of drafts accepted"
    )
    steps = Table(title="time per step, means in microseconds")
    for name in ("rows", "gateway's own", "verifier idle", "forward", "sample + commit"):
        steps.add_column(name, justify="right")
    for step in figures["steps"]:
        steps.add_row(
            f"{step['rows']:.1f}",
            f"{step['gateway_us']:.0f}",
            f"{step['verifier_idle_us']:.0f}",
            f"{step['forward_us']:.0f}",
            f"{step['sample_us']:.0f}",
        )
    console.print(steps)
