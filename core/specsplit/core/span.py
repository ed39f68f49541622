"""What a finished span is. Knows no exporter and no service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from specsplit.core.trace_context import TraceContext, start_span

SCOPE = "specsplit"
"""The instrumentation scope of all spans."""

Value: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes: TypeAlias = Mapping[str, Value]

_NONE: Attributes = MappingProxyType({})


class Span(NamedTuple):
    """Times are nanoseconds since the Unix epoch.

    A named tuple costs a third of a frozen dataclass, and a decoding row makes three spans in each step.
    """

    name: str
    trace_id: int
    span_id: int
    parent_span_id: int | None
    """None at the root of a trace; of another process when `is_server`."""
    start_ns: int
    end_ns: int
    attributes: Attributes = _NONE
    shared: Attributes = _NONE
    """Further attributes, the same object in all spans that have them: it is encoded once."""
    links: Sequence[TraceContext] = ()
    """Spans of other processes; may be one object in many spans, too."""
    is_server: bool = False
    """Kind SERVER: a request from outside; else INTERNAL."""
    is_error: bool = False

    @property
    def traceparent(self) -> str:
        return TraceContext(self.trace_id, self.span_id, is_sampled=True).traceparent


def batch_span(
    name: str, *, start_ns: int, end_ns: int, attributes: Attributes, links: Sequence[TraceContext]
) -> Span:
    """Of work for several requests at once: the root of a trace of its own, linked to their spans."""
    context = start_span("", ratio=1)
    return Span(name, context.trace_id, context.span_id, None, start_ns, end_ns, attributes, links=links)
