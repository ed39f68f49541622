"""The gateway's engine over real gRPC, against verifiers and a drafter that do as they are told."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from specsplit.core.codec import drafter as drafter_codec
from specsplit.core.codec import verifier as verifier_codec
from specsplit.core.trace_context import start_span
from specsplit.core.types import (
    Capacity,
    CloseRequest,
    Delta,
    DraftBatch,
    DraftBatchDone,
    DrafterDescription,
    DraftRowDone,
    DraftStatus,
    Finished,
    FinishReason,
    Opened,
    OpenRequest,
    Order,
    RowDone,
    SamplingParams,
    Status,
    Step,
    StepDone,
    StepRow,
    VerifierDescription,
    VerifierEvent,
    new_incarnation,
    new_request_id,
)
from specsplit.gateway.dispatcher import Dispatcher
from specsplit.gateway.records import Reporter, RequestRecord, StepRecord
from specsplit.gateway.request import AdmittedRequest
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.target import Target
from specsplit.gateway.text.tokenizer import Tokenizer
from specsplit.v1 import drafter_pb2_grpc, verifier_pb2_grpc

VOCAB = 200


def target(token_id: int) -> int:
    """The scripted target: each token decides the next."""
    return (token_id * 7 + 3) % VOCAB


def continuation(last: int, num: int) -> list[int]:
    out = []
    for _ in range(num):
        last = target(last)
        out.append(last)
    return out


class ScriptedVerifier(verifier_pb2_grpc.VerifierServicer):
    """Verifies exactly against `target`; `twist` may replace or drop each event."""

    def __init__(self) -> None:
        self.description = VerifierDescription(
            model="scripted",
            revision="",
            dtype="float32",
            numerics="scripted",
            tokenizer_digest="",
            vocab_size=VOCAB,
            max_sequence_tokens=200,
            block_size=16,
            num_blocks=64,
            max_step_tokens=128,
            max_step_rows=16,
            incarnation=new_incarnation(),
            registry_namespace=b"n" * 8,
            eos_token_ids=(),
        )
        self.twist: Callable[[VerifierEvent], VerifierEvent | None] = lambda event: event
        self.is_hung = False  # streams are taken, but nothing is said on them
        self.sequences: dict[bytes, tuple[OpenRequest, list[int]]] = {}
        self.opens: list[OpenRequest] = []
        self.steps: list[Step] = []
        self.num_described = 0

    async def Describe(self, request: Any, context: Any) -> Any:
        self.num_described += 1
        return verifier_codec.description_to_pb(self.description)

    async def Run(self, commands: Any, context: Any) -> AsyncIterator[Any]:
        if self.is_hung:
            await asyncio.Event().wait()
        yield verifier_codec.event_to_pb(Capacity(2, 64))
        async for message in commands:
            command = verifier_codec.command_from_pb(message)
            event: VerifierEvent | None = None
            match command:
                case OpenRequest():
                    self.opens.append(command)
                    ids = [*command.prompt_ids, *command.output_ids]
                    self.sequences[command.request_id] = (command, ids)
                    event = Opened(command.request_id, command.generation, Status.OK, 64)
                case CloseRequest():
                    self.sequences.pop(command.request_id, None)
                case Step():
                    self.steps.append(command)
                    rows = tuple(self._verify(row) for row in command.rows)
                    event = StepDone(command.step_id, rows, 1, 1, 1, 1, 1, len(rows), 64)
            if event is not None:
                event = self.twist(event)
            if event is not None:
                yield verifier_codec.event_to_pb(event)

    def _verify(self, row: StepRow) -> RowDone:
        opened, ids = self.sequences[row.request_id]
        assert (row.generation, row.base_len) == (opened.generation, len(ids))
        if not row.is_sampling:
            return RowDone(
                row.request_id, row.generation, row.base_len, Status.OK, row.num_computed + row.num_tokens
            )
        committed: list[int] = []
        for draft in [*row.draft_ids, None]:
            committed.append(target((ids + committed)[-1]))
            if draft != committed[-1]:
                break
        left = opened.sampling.max_tokens - (len(ids) - len(opened.prompt_ids))
        committed = committed[:left]
        ids.extend(committed)
        return RowDone(
            request_id=row.request_id,
            generation=row.generation,
            base_len=row.base_len,
            status=Status.OK,
            num_computed=len(ids) - 1,
            committed_ids=tuple(committed),
            num_accepted=min(len(committed), sum(map(int.__eq__, committed, row.draft_ids))),
            finish_reason=FinishReason.LENGTH if len(committed) == left else None,
        )


class ScriptedDrafter(drafter_pb2_grpc.DrafterServicer):
    """Proposes the target's own continuation; `twist` may change or withhold each answer."""

    def __init__(self) -> None:
        self.twist: Callable[[DraftBatch, DraftBatchDone], DraftBatchDone | None] = lambda _, done: done
        self.batches: list[DraftBatch] = []
        self.last: dict[bytes, int] = {}

    async def Describe(self, request: Any, context: Any) -> Any:
        return drafter_codec.description_to_pb(DrafterDescription("scripted", 8, "", new_incarnation()))

    async def Run(self, commands: Any, context: Any) -> AsyncIterator[Any]:
        async for message in commands:
            command = drafter_codec.command_from_pb(message)
            if not isinstance(command, DraftBatch):
                continue
            self.batches.append(command)
            rows = tuple(
                DraftRowDone(
                    row.request_id,
                    row.generation,
                    row.base_len,
                    DraftStatus.OK,
                    tuple(continuation(row.new_ids[-1], row.max_draft)),
                )
                for row in command.rows
            )
            done = self.twist(command, DraftBatchDone(command.batch_id, rows, 1))
            if done is not None:
                yield drafter_codec.batch_done_to_pb(done)


class Recorder:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.admitted_requests: list[AdmittedRequest] = []
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []

    def admitted(self, request: AdmittedRequest, *, at_ns: int) -> None:
        self.admitted_requests.append(request)

    def stepped(self, step: StepRecord) -> None:
        self.steps.append(step)

    def ended(self, record: RequestRecord) -> None:
        self.requests.append(record)


@dataclasses.dataclass
class Bench:
    loop: Dispatcher
    verifiers: list[ScriptedVerifier]
    drafter: ScriptedDrafter
    addresses: list[str]
    """Of the verifiers."""
    recorder: Recorder
    reporter: Reporter

    @property
    def target(self) -> Target:
        """The gateway's end of the only verifier."""
        (replica,) = self.loop._replicas.values()
        return replica._target

    @property
    def verifier(self) -> ScriptedVerifier:
        (verifier,) = self.verifiers
        return verifier

    async def text(
        self, prompt: list[int], *, max_tokens: int = 20, k: int = 4, arrival: int = 0
    ) -> list[int]:
        ids: list[int] = []
        async for event in self.loop.generate(admitted(prompt, max_tokens=max_tokens, k=k, arrival=arrival)):
            if isinstance(event, Delta):
                ids += event.ids
            elif isinstance(event, Finished):
                assert event.usage.completion_tokens == len(ids)
        return ids

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.loop.counters())


def admitted(prompt: list[int], *, max_tokens: int = 20, k: int = 4, arrival: int = 0) -> AdmittedRequest:
    id_ = new_request_id()
    return AdmittedRequest(
        request_id=id_,
        order=Order(0, arrival, id_),
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        stop=(),
        k=k,
        trace=start_span("", ratio=1),
    )


async def _serve(add: Callable[[Any, Any], None], servicer: Any) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@asynccontextmanager
async def bench(
    tiny_model_dir: Path, *, num_verifiers: int = 1, draft_timeout_ms: float = 2000, **settings: Any
) -> AsyncIterator[Bench]:
    verifiers, drafter = [ScriptedVerifier() for _ in range(num_verifiers)], ScriptedDrafter()
    servers, addresses = [], []
    for verifier in verifiers:
        server, address = await _serve(verifier_pb2_grpc.add_VerifierServicer_to_server, verifier)
        servers.append(server)
        addresses.append(address)
    server, drafter_address = await _serve(drafter_pb2_grpc.add_DrafterServicer_to_server, drafter)
    servers.append(server)
    recorder = Recorder()
    reporter = Reporter([recorder])
    loop = Dispatcher(
        GatewaySettings(
            verifiers=tuple(addresses),
            drafter=drafter_address,
            tokenizer=tiny_model_dir,
            draft_timeout_ms=draft_timeout_ms,
            **settings,
        ),
        Tokenizer.load(tiny_model_dir),
        reporter,
    )
    running = asyncio.ensure_future(loop.run())
    try:
        async with asyncio.timeout(20):
            while not (loop.counters()["verifier_up"] == num_verifiers and loop.counters()["drafter_up"]):
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)
        yield Bench(loop, verifiers, drafter, addresses, recorder, reporter)
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for server in servers:
            await server.stop(None)
