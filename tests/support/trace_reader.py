"""Spans of a trace file with their service, and attributes as plain values. Knows no service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from otlp_json import parse_line


@dataclass(frozen=True)
class Span:
    """Ids are hexadecimal; that of the parent is empty at the root of a trace."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    """Trace id and span id of each."""
    is_error: bool


def read_spans(path: Path) -> list[Span]:
    return [
        Span(
            service=_attributes(of_resource.resource.attributes)["service.name"],
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_span_id=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes=_attributes(span.attributes),
            links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            is_error=span.status.code == Status.STATUS_CODE_ERROR,
        )
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")  # else somebody is writing it
        for of_resource in parse_line(line).resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def _attributes(entries: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(entries)
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(element) for element in value.array_value.values)
    return getattr(value, kind or "string_value")
