"""Sends spans to an OpenTelemetry collector, as the OTEL_EXPORTER_OTLP_* variables say. Knows no service."""

from __future__ import annotations

import os
from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from specsplit.core.errors import SettingsError, Unavailable
from specsplit.core.span import SCOPE, Attributes, Span

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


class OtlpExporter:
    """Endpoint, headers, TLS, compression and time-out are read by OpenTelemetry's own exporters."""

    def __init__(self, resource: Attributes) -> None:
        self._resource = Resource(resource)
        self._scope = InstrumentationScope(SCOPE, str(resource["service.version"]))
        self._exporter = _make_exporter()

    def export(self, spans: Sequence[Span]) -> None:
        if self._exporter.export([self._readable(span) for span in spans]) is not SpanExportResult.SUCCESS:
            raise Unavailable("the collector took no spans")

    def close(self) -> None:
        self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        parent = None
        if span.parent_span_id is not None:
            parent = SpanContext(span.trace_id, span.parent_span_id, span.is_server, _SAMPLED)
        return ReadableSpan(
            name=span.name,
            context=SpanContext(span.trace_id, span.span_id, False, _SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes={**span.shared, **span.attributes},
            links=[Link(SpanContext(link.trace_id, link.span_id, True, _SAMPLED)) for link in span.links],
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=_ERROR if span.is_error else _UNSET,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


def _make_exporter() -> SpanExporter:
    """gRPC unless the environment asks for HTTP."""
    name, protocol = next(
        ((name, os.environ[name]) for name in _PROTOCOLS if os.environ.get(name)), (_PROTOCOLS[1], "grpc")
    )
    match protocol:
        case "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

            return OverGrpc()
        case "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

            return OverHttp()
        case _:
            raise SettingsError(f"{name}: must be grpc or http/protobuf, not {protocol}", field=name)
