"""The drafter's metrics: its answers, counted as they are made, and the service's own counters.

Knows no gRPC and no way of proposing. docs/metrics.md lists all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from specsplit.core.metrics import COUNTS, SECONDS, Histogram, Reading, Readings
from specsplit.core.types import DraftBatch, DraftBatchDone, DraftStatus

PREFIX = "specsplit_drafter_"
_MATCH_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
_DRAFT_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Metrics:
    def __init__(self, registry: CollectorRegistry, read: Callable[[], Mapping[str, int]]) -> None:
        """`read` gives the service's own counters and may be called from any thread."""
        Readings(registry, PREFIX, read, _COUNTERS)
        self._seconds = Histogram(
            registry, PREFIX + "draft_seconds", "From the arrival of a batch to its answer.", SECONDS
        )
        self._rows = Histogram(registry, PREFIX + "batch_rows", "Rows of a batch.", COUNTS)
        self._drafts = Histogram(
            registry, PREFIX + "draft_tokens", "Tokens proposed to a row that wanted some.", _DRAFT_LENGTHS
        )
        self._matches = Histogram(
            registry,
            PREFIX + "match_tokens",
            "Length of the context's end that the proposal follows; 0 where nothing matched.",
            _MATCH_LENGTHS,
        )

    def answered(self, batch: DraftBatch, done: DraftBatchDone) -> None:
        self._seconds.observe(done.draft_us * 1e-6)
        self._rows.observe(len(batch.rows))
        for asked, row in zip(batch.rows, done.rows, strict=True):
            if row.status is DraftStatus.OK and asked.max_draft:
                self._drafts.observe(len(row.draft_ids))
                self._matches.observe(row.match_len)


_COUNTERS = (
    Reading("batches", "batches_total", "Batches answered."),
    Reading("rows", "rows_total", "Rows of those batches."),
    Reading("need_context", "need_context_rows_total", "Rows answered with NEED_CONTEXT."),
    Reading("invalid_rows", "invalid_rows_total", "Rows that were refused as INVALID."),
    Reading("drafted", "drafted_tokens_total", "Tokens proposed."),
    Reading("requests", "requests", "Requests held."),
    Reading("context_tokens", "context_tokens", "Tokens held for all requests."),
    Reading("streams", "streams", "Streams of gateways."),
    Reading(
        "invariant_violations",
        "invariant_violations_total",
        "Broken promises of this program; each one is a bug.",
    ),
)
