"""Reads OTLP JSON lines by OpenTelemetry's own schema: what that does not know is an error."""

from __future__ import annotations

import base64
import json
from typing import Any

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


def parse_spans(text: str) -> list[Span]:
    return [
        span
        for line in text.splitlines()
        for of_resource in parse_line(line).resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def parse_line(line: str) -> ExportTraceServiceRequest:
    return ParseDict(_with_bytes(json.loads(line)), ExportTraceServiceRequest())


def _with_bytes(value: Any) -> Any:
    """Ids are hexadecimal in OTLP; the JSON of protobuf has base64."""
    match value:
        case dict():
            return {
                key: base64.b64encode(bytes.fromhex(item)).decode()
                if key in ("traceId", "spanId", "parentSpanId")
                else _with_bytes(item)
                for key, item in value.items()
            }
        case list():
            return [_with_bytes(item) for item in value]
        case _:
            return value
