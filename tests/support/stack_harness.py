"""Starts the whole system as real processes and talks to it; used by the end-to-end suites."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import redis
from metrics_check import Scraped, scrape
from trace_reader import Span, read_spans

from specsplit.core.codec import common as common_codec
from specsplit.core.codec import gateway as gateway_codec
from specsplit.core.registry.overview import RegisteredReplica, read_replicas
from specsplit.core.registry.scripts import ReplicaKeys
from specsplit.core.types import Delta, Finished, GenerateRequest, Started, TokenLogprobs, Usage
from specsplit.v1 import common_pb2, drafter_pb2_grpc, gateway_pb2_grpc, verifier_pb2_grpc

START_SECONDS = 240
STUBS = {
    "gateway": gateway_pb2_grpc.GatewayStub,
    "verifier": verifier_pb2_grpc.VerifierStub,
    "drafter": drafter_pb2_grpc.DrafterStub,
}
MARGIN_OF_A_NEAR_TIE = 1e-3


@dataclass
class Result:
    """All that a client was told about one request."""

    prompt_ids: list[int] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish_reason: str = ""
    usage: Usage | None = None
    num_deltas: int = 0


class Stack:
    """A running `specsplit serve`."""

    def __init__(self, folder: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.output = folder / "serve.out"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "specsplit.cli", "serve"),
                    *("--port", "0", "--grpc-port", "0", "--dir", str(folder), *args),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def describe(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())
        return state

    def child(self, role: str, index: int = 0) -> dict[str, Any]:
        (child,) = (c for c in self.describe()["children"] if (c["role"], c["index"]) == (role, index))
        return dict(child)

    def pid(self, role: str, index: int = 0) -> int:
        return int(self.child(role, index)["pid"])

    @property
    def http(self) -> str:
        return f"http://{self.child('gateway')['addresses']['http']}"

    def address(self, role: str, index: int = 0) -> str:
        return str(self.child(role, index)["addresses"]["grpc"])

    def kill(self, role: str, index: int = 0) -> int:
        """SIGKILL; returns the pid that was killed."""
        pid = self.pid(role, index)
        os.kill(pid, signal.SIGKILL)
        return pid

    @contextlib.contextmanager
    def frozen(self, role: str, index: int = 0) -> Iterator[None]:
        """A process that neither answers nor dies."""
        pid = self.pid(role, index)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def registry(self) -> redis.Redis:
        """A client of the registry that the stack uses."""
        return redis.Redis.from_url(self.describe()["redis_url"])

    def replicas(self) -> dict[str, RegisteredReplica]:
        """The replicas in the registry, by address; all have one namespace."""
        with self.registry() as client:
            found = read_replicas(client)
        assert len(found) <= 1, found
        return {replica.address: replica for replicas in found.values() for replica in replicas}

    def wait_published(self) -> None:
        """Until the registry holds for every verifier as many blocks as that one says it caches."""
        verifiers = [child["index"] for child in self.describe()["children"] if child["role"] == "verifier"]
        deadline = time.monotonic() + 60
        while True:
            cached = {
                self.address("verifier", index): self.stats("verifier", index)["cached_blocks"]
                for index in verifiers
            }
            if self._published() == cached:
                return
            assert time.monotonic() < deadline, f"{self._published()} is published, not {cached}"
            time.sleep(0.05)

    def _published(self) -> dict[str, int]:
        """By address; a replica whose set of blocks is not as large as it says has none that count."""
        published = {}
        with self.registry() as client, contextlib.suppress(redis.RedisError):
            for namespace, replicas in read_replicas(client).items():
                for replica in replicas:
                    keys = ReplicaKeys.of(namespace, replica.name, replica.incarnation)
                    if client.scard(keys.blocks) == replica.num_blocks:
                        published[replica.address] = replica.num_blocks
        return published

    def metrics(self, role: str, index: int = 0) -> Scraped:
        """What `/metrics` of a service says now."""
        addresses = self.child(role, index)["addresses"]
        return scrape(addresses["http" if role == "gateway" else "metrics"])

    def spans(self) -> list[Span]:
        """All spans that the services have written so far."""
        return read_spans(self.folder / "traces.jsonl")

    def wait_spans(self, predicate: Callable[[list[Span]], bool], what: str) -> list[Span]:
        """Until what was written satisfies `predicate`; spans come in batches."""
        deadline = time.monotonic() + 60
        while not predicate(spans := self.spans()):
            assert time.monotonic() < deadline, f"{what} never came: {len(spans)} spans"
            time.sleep(0.1)
        return spans

    def wait_ready(self, predicate: Callable[[dict[str, Any]], bool] = lambda _: True) -> None:
        """Until every child is ready and `predicate` holds for stack.json; fails with the output so far."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if (self.folder / "stack.json").exists():
                state = self.describe()
                children = state["children"]
                if (
                    any(c["role"] == "gateway" for c in children)  # the last one to be started
                    and all(c["state"] == "ready" for c in children)
                    and predicate(state)
                ):
                    return
            time.sleep(0.05)
        logs = "\n".join(p.read_text()[-3000:] for p in sorted(self.folder.glob("logs/*.log")))
        raise AssertionError(f"not ready: {self.output.read_text()}\n{logs}")

    def wait_replaced(self, pid: int) -> None:
        """Until all services are ready and none of them is the process `pid`."""
        self.wait_ready(lambda state: all(child["pid"] != pid for child in state["children"]))

    def stop(self) -> int:
        """Like Ctrl-C; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def stats(self, role: str, index: int = 0) -> dict[str, int]:
        with grpc.insecure_channel(self.address(role, index)) as channel:
            reply = STUBS[role](channel).Stats(common_pb2.StatsRequest(), timeout=20)
        return common_codec.stats_from_pb(reply)

    def wait_stats(
        self, role: str, predicate: Callable[[dict[str, int]], bool], what: str, *, index: int = 0
    ) -> dict[str, int]:
        deadline = time.monotonic() + 60
        stats: dict[str, int] = {}
        while time.monotonic() < deadline:
            stats = self.stats(role, index)
            if predicate(stats):
                return stats
            time.sleep(0.05)
        raise AssertionError(f"{role}-{index}: {what} never came: {stats}")


class Client:
    """The gRPC API of the stack's gateway."""

    def __init__(self, stack: Stack) -> None:
        self._channel = grpc.aio.insecure_channel(stack.address("gateway"))
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def generate(
        self,
        request: GenerateRequest,
        *,
        cancel_after: int | None = None,
        on_delta: Callable[[Result], None] | None = None,
        traceparent: str | None = None,
    ) -> Result:
        """Reads to the end, or cancels once `cancel_after` tokens have come."""
        metadata = None if traceparent is None else (("traceparent", traceparent),)
        call = self._stub.Generate(gateway_codec.generate_request_to_pb(request), metadata=metadata)
        result = Result()
        try:
            async for message in call:
                match gateway_codec.event_from_pb(message):
                    case Started(prompt_ids=prompt_ids):
                        result.prompt_ids = list(prompt_ids)
                        if cancel_after == 0:
                            break
                    case Delta() as delta:
                        result.text += delta.text
                        result.ids += delta.ids
                        result.logprobs += delta.logprobs
                        result.margins += delta.margins
                        result.num_deltas += 1
                        if on_delta is not None:
                            on_delta(result)
                        if cancel_after is not None and len(result.ids) >= cancel_after:
                            break
                    case Finished() as finished:
                        result.finish_reason = finished.finish_reason.openai
                        result.usage = finished.usage
        finally:
            call.cancel()
        return result

    async def generate_all(self, requests: list[GenerateRequest], *, limit: int = 32) -> list[Result]:
        gate = asyncio.Semaphore(limit)

        async def one(request: GenerateRequest) -> Result:
            async with gate:
                return await self.generate(request)

        return list(await asyncio.gather(*(one(request) for request in requests)))


def assert_same_output(got: Result, alone: Result) -> bool:
    """Equal text, ids and reason; True when a near-tie, shown by its margin, went the other way.

    Everything before the flip must be equal; what comes after is a different text.
    """
    for index, (ours, theirs) in enumerate(zip(got.ids, alone.ids, strict=False)):
        if ours != theirs:
            margin = min(got.margins[index], alone.margins[index])
            assert margin < MARGIN_OF_A_NEAR_TIE, (
                f"token {index}: {ours} is not {theirs}, margins {got.margins[index]} and "
                f"{alone.margins[index]}\n{got.text!r}\n{alone.text!r}"
            )
            return True
    assert got.ids == alone.ids
    assert got.text == alone.text
    assert got.finish_reason == alone.finish_reason
    assert got.usage is not None
    assert got.usage.completion_tokens == len(got.ids)
    return False
