"""The drafter's gRPC service: streams of batches in, drafts out. Knows no way of proposing."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Generic

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from specsplit.core.codec import common as common_codec
from specsplit.core.codec import drafter as codec
from specsplit.core.errors import InvalidRequest
from specsplit.core.serving import abort, num_open_files
from specsplit.core.span import batch_span
from specsplit.core.tracing import SpanSink
from specsplit.core.types import (
    MAX_DRAFT,
    CloseDraft,
    DraftBatch,
    DraftBatchDone,
    DrafterDescription,
    DraftRow,
    DraftRowDone,
    DraftStatus,
    RequestId,
    new_incarnation,
)
from specsplit.drafter.metrics import Metrics
from specsplit.drafter.proposer import Ask, Draft, Proposer, State
from specsplit.drafter.table import DraftTable, Held, Refusal
from specsplit.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc

SERVICE_NAME = "specsplit.v1.Drafter"
_COUNTS = ("batches", "rows", "drafted", "need_context", "invalid_rows", "invariant_violations")
_MAX_BUSY_SECONDS = 0.002  # taking in long contexts lets the event loop breathe this often


class DrafterService(drafter_pb2_grpc.DrafterServicer, Generic[State]):
    """Answers each stream's batches in their order; streams share the proposer and the table's bounds."""

    def __init__(
        self,
        proposer: Proposer[State],
        *,
        max_context_tokens: int,
        idle_seconds: float,
        metrics: CollectorRegistry | None = None,
        spans: SpanSink | None = None,
    ) -> None:
        """`metrics` is where the service's metrics are registered, `spans` where its spans go."""
        self._proposer = proposer
        self._table = DraftTable(proposer, max_context_tokens=max_context_tokens, idle_seconds=idle_seconds)
        self._idle_seconds = idle_seconds
        self._dropping_idle: asyncio.Task[None] | None = None
        self._incarnation = new_incarnation()
        self._stream_ids = itertools.count()
        self._num_streams = 0
        self._num_batches_running = 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._metrics = Metrics(metrics or CollectorRegistry(), self.counters)
        self._spans = spans

    async def Describe(
        self, request: drafter_pb2.DescribeDrafterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> drafter_pb2.DrafterDescription:
        description = DrafterDescription(
            name=self._proposer.name, max_draft=MAX_DRAFT, tokenizer_digest="", incarnation=self._incarnation
        )
        return codec.description_to_pb(description)

    async def Stats(
        self, request: common_pb2.StatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.StatsReply:
        return common_codec.stats_to_pb({**self.counters(), "open_fds": num_open_files()})

    def counters(self) -> dict[str, int]:
        """Levels now and totals since the start; may be called from any thread."""
        return {
            "requests": len(self._table),
            "streams": self._num_streams,
            "context_tokens": self._table.num_context_tokens,
            **self._counts,
        }

    async def Run(
        self,
        request_iterator: AsyncIterator[drafter_pb2.DraftCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[drafter_pb2.DraftBatchDone]:
        stream = next(self._stream_ids)
        self._num_streams += 1
        try:
            async for pb in request_iterator:
                match codec.command_from_pb(pb):
                    case DraftBatch() as batch:
                        yield codec.batch_done_to_pb(await self._answer(stream, batch))
                    case CloseDraft(request_id):
                        self._table.drop(stream, request_id)
        except InvalidRequest as error:
            await abort(context, error)
        except DecodeError:
            await abort(context, InvalidRequest("not a DraftCommand", field="command"))
        except AssertionError:
            self._counts["invariant_violations"] += 1
            raise
        finally:
            self._num_streams -= 1
            self._table.drop_stream(stream)

    async def start(self) -> None:
        self._dropping_idle = asyncio.create_task(self._drop_idle_forever())

    async def close(self) -> None:
        if self._dropping_idle is not None:
            self._dropping_idle.cancel()

    async def drain(self) -> None:
        """Returns when no batch is being worked on; a stream between batches loses nothing by ending."""
        await self._all_answered.wait()

    async def _drop_idle_forever(self) -> None:
        while True:
            await asyncio.sleep(self._idle_seconds / 4)
            self._table.drop_idle()

    async def _answer(self, stream: int, batch: DraftBatch) -> DraftBatchDone:
        started, started_ns = time.perf_counter(), time.time_ns()
        self._num_batches_running += 1
        self._all_answered.clear()
        try:
            taken = await self._take(stream, batch.rows)
            drafts = self._propose(stream, batch.rows, taken)
        finally:
            self._num_batches_running -= 1
            if not self._num_batches_running:
                self._all_answered.set()
        rows = tuple(map(_row_done, batch.rows, drafts))
        self._counts["batches"] += 1
        self._counts["rows"] += len(rows)
        self._counts["drafted"] += sum(len(row.draft_ids) for row in rows)
        self._counts["need_context"] += sum(row.status is DraftStatus.NEED_CONTEXT for row in rows)
        self._counts["invalid_rows"] += sum(row.status is DraftStatus.INVALID for row in rows)
        done = DraftBatchDone(batch.batch_id, rows, draft_us=round((time.perf_counter() - started) * 1e6))
        done = self._traced(done, taken, started_ns)
        self._metrics.answered(batch, done)
        return done

    def _traced(
        self, done: DraftBatchDone, taken: list[Held[State] | Refusal], started_ns: int
    ) -> DraftBatchDone:
        """With the context of a span of the batch, if a request in it is sampled."""
        links = [held.trace for held in taken if isinstance(held, Held) and held.trace is not None]
        if self._spans is None or not links:
            return done
        span = batch_span(
            "draft batch",
            start_ns=started_ns,
            end_ns=time.time_ns(),
            attributes={
                "specsplit.drafter": self._proposer.name,
                "specsplit.batch_rows": len(done.rows),
                "specsplit.drafted": sum(len(row.draft_ids) for row in done.rows),
                "specsplit.need_context": sum(row.status is DraftStatus.NEED_CONTEXT for row in done.rows),
                "specsplit.draft_us": done.draft_us,
                "specsplit.incarnation": self._incarnation.hex(),
            },
            links=links,
        )
        self._spans.put((span,))
        return replace(done, traceparent=span.traceparent)

    async def _take(self, stream: int, rows: tuple[DraftRow, ...]) -> list[Held[State] | Refusal]:
        taken: list[Held[State] | Refusal] = []
        seen: set[RequestId] = set()
        busy_since = time.perf_counter()
        for row in rows:
            if row.request_id in seen:
                taken.append(Refusal(DraftStatus.INVALID, "request_id: appears twice in the batch"))
            else:
                seen.add(row.request_id)
                taken.append(self._table.take(stream, row))
            if time.perf_counter() - busy_since > _MAX_BUSY_SECONDS:
                await asyncio.sleep(0)
                busy_since = time.perf_counter()
        return taken

    def _propose(
        self, stream: int, rows: tuple[DraftRow, ...], taken: list[Held[State] | Refusal]
    ) -> list[Draft | Refusal]:
        """One batched call for all rows that want a draft and are still held."""
        results: list[Draft | Refusal] = [Draft()] * len(rows)
        asks: list[Ask[State]] = []
        asking: list[int] = []  # row of each ask
        for index, (row, held) in enumerate(zip(rows, taken, strict=True)):
            if isinstance(held, Refusal):
                results[index] = held
            elif not self._table.holds(stream, row.request_id, held):
                results[index] = Refusal(DraftStatus.NEED_CONTEXT, "evicted for other requests")
            elif row.max_draft:
                asks.append(Ask(held.state, row.max_draft))
                asking.append(index)
        for index, draft in zip(asking, self._proposer.propose(asks), strict=True):
            assert len(draft.ids) <= rows[index].max_draft, "a draft is longer than granted"
            results[index] = draft
        return results


def _row_done(row: DraftRow, result: Draft | Refusal) -> DraftRowDone:
    if isinstance(result, Refusal):
        return DraftRowDone(
            row.request_id, row.generation, row.base_len, status=result.status, detail=result.detail
        )
    return DraftRowDone(
        row.request_id,
        row.generation,
        row.base_len,
        status=DraftStatus.OK,
        draft_ids=result.ids,
        confidence=result.confidence,
        draft_probs=result.probs,
        match_len=result.match_len,
    )
