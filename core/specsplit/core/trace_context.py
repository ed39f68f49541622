"""Which trace a request belongs to and whether its details are kept. Knows no spans and no exporter.

W3C Trace Context (https://www.w3.org/TR/trace-context/): `00-<trace id>-<parent span id>-<flags>`.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 0x01
_random = random.Random()  # seeded by the system; asking it for each id would cost a microsecond more


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span's place: `parent_span_id` is None at the root of a trace.

    `is_sampled` is about details: spans of steps and of other services. The span of a request is kept always.
    """

    trace_id: int
    span_id: int
    is_sampled: bool
    parent_span_id: int | None = None

    @property
    def traceparent(self) -> str:
        """The header that makes a span of another process a child of this one."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def parse_traceparent(value: str) -> TraceContext | None:
    """The span that a header names; None for a header that names none, as the standard demands."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED))


def parse_sampled(traceparent: str) -> TraceContext | None:
    """The span that a message between services names, if the details of its trace are kept."""
    context = parse_traceparent(traceparent)
    return context if context is not None and context.is_sampled else None


def start_span(traceparent: str, *, ratio: float) -> TraceContext:
    """A new span that continues the caller's trace, by the caller's choice of details.

    Without a caller's trace it is the root of a new one, whose details are kept with probability `ratio`.
    """
    parent = parse_traceparent(traceparent)
    if parent is not None:
        return TraceContext(parent.trace_id, new_span_id(), parent.is_sampled, parent.span_id)
    return TraceContext(_non_zero_bits(128), new_span_id(), _random.random() < ratio)


def new_span_id() -> int:
    return _non_zero_bits(64)


def _non_zero_bits(num_bits: int) -> int:
    """Zero is no id."""
    while not (bits := _random.getrandbits(num_bits)):
        pass
    return bits
