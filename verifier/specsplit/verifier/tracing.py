"""The span of a batch, linked to the requests that it ran for. Knows no exporter; runs beside the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsplit.core.span import Span, batch_span
from specsplit.core.trace_context import TraceContext
from specsplit.core.types import StepDone


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """A batch that ran rows of sampled requests; times are nanoseconds since the Unix epoch."""

    requests: tuple[TraceContext, ...]
    started_ns: int
    ended_ns: int


def span_of(batch: TracedBatch, steps: Sequence[StepDone], *, incarnation: bytes) -> Span:
    """`steps` are those that were merged into the batch."""
    done = steps[0]  # all but the waiting is the same in all of them
    return batch_span(
        "verify batch",
        start_ns=batch.started_ns,
        end_ns=batch.ended_ns,
        attributes={
            "specsplit.incarnation": incarnation.hex(),
            "specsplit.batch_steps": len(steps),
            "specsplit.batch_rows": done.batch_rows,
            "specsplit.batch_tokens": done.batch_tokens,
            "specsplit.queue_us": max(step.queue_us for step in steps),
            "specsplit.forward_us": done.forward_us,
            "specsplit.sample_us": done.sample_us,
            "specsplit.idle_us": done.idle_us,
        },
        links=batch.requests,
    )
