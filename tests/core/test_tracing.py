"""Where spans go: files and collectors, and what becomes of them when a collector is dead or hangs."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from otlp_json import parse_line, parse_spans

from specsplit.core.errors import SettingsError
from specsplit.core.span import Span
from specsplit.core.trace_context import TraceContext
from specsplit.core.tracing import SpanSink, open_sink

VARIABLES = ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL", "HEADERS", "TIMEOUT", "INSECURE")


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{variable}", raising=False)


def span(number: int) -> Span:
    return Span("step", 1, number, None, 10, 20)


def numbers(spans: Sequence[Any]) -> list[int]:
    return [int.from_bytes(s.span_id, "big") for s in spans]


# --- collectors -------------------------------------------------------------------------------------------


class Collector:
    """What a receiver got; it answers only while `may_answer` is set."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: dict[str, str] = {}
        self.endpoint = ""
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def take(self, request: ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        self.headers = headers
        self.is_asked.set()
        self.may_answer.wait()
        self.requests.append(request)

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]


@pytest.fixture
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
            collector.take(request, {key: str(value) for key, value in context.invocation_metadata()})
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    collector.may_answer.set()
    server.stop(None).wait()


@pytest.fixture
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(ExportTraceServiceRequest.FromString(body), dict(self.headers))
            try:
                self.send_response(200)
                self.end_headers()
            except OSError:  # the client did not wait
                pass

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield collector
    collector.may_answer.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_gets_spans(protocol: str, request: pytest.FixtureRequest, monkeypatch, tmp_path) -> None:
    collector = request.getfixturevalue("grpc_collector" if protocol == "grpc" else "http_collector")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    if protocol != "grpc":  # the default
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    sink = open_sink("gateway", tmp_path / "not-written.jsonl")
    assert sink is not None
    sent = Span(
        name="chat tiny",
        trace_id=0xABC,
        span_id=0xDEF,
        parent_span_id=0x123,
        start_ns=10**18,
        end_ns=10**18 + 5,
        attributes={"number": 1, "words": ("a", "b"), "real": 0.5, "flag": True},
        shared={"text": "t"},
        links=(TraceContext(7, 8, is_sampled=True),),
        is_server=True,
        is_error=True,
    )
    sink.put((sent, span(2)))
    sink.close(timeout=30)
    assert not sink.num_dropped
    assert not (tmp_path / "not-written.jsonl").exists()
    assert {key.lower(): value for key, value in collector.headers.items()}["x-tenant"] == "blue"
    resource = {
        a.key: a.value.string_value for a in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "specsplit-gateway"
    assert resource["deployment.environment.name"] == "test"
    assert resource["service.instance.id"]
    assert resource["service.version"]
    got, second = collector.spans
    assert (int.from_bytes(got.trace_id, "big"), *numbers([got])) == (0xABC, 0xDEF)
    assert int.from_bytes(got.parent_span_id, "big") == 0x123
    assert (got.name, got.kind, got.status.code) == ("chat tiny", got.SPAN_KIND_SERVER, 2)
    assert (got.start_time_unix_nano, got.end_time_unix_nano) == (10**18, 10**18 + 5)
    values = {a.key: a.value for a in got.attributes}
    assert (values["number"].int_value, values["real"].double_value) == (1, 0.5)
    assert values["flag"].bool_value is True
    assert values["text"].string_value == "t"
    assert [v.string_value for v in values["words"].array_value.values] == ["a", "b"]
    assert [int.from_bytes(link.span_id, "big") for link in got.links] == [8]
    assert (second.kind, second.status.code, second.parent_span_id) == (second.SPAN_KIND_INTERNAL, 0, b"")


@pytest.fixture
def dead_endpoint() -> Iterator[str]:
    """A port that nobody listens on: it is bound, so that nobody else gets it either."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("state", ["dead", "hanging"])
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_does_not_answer_delays_nobody(
    protocol: str,
    state: str,
    dead_endpoint: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spans are taken at once while an export waits, are dropped beyond the bound, and closing has an end."""
    collector = request.getfixturevalue("grpc_collector" if protocol == "grpc" else "http_collector")
    collector.may_answer.clear()
    endpoint = collector.endpoint if state == "hanging" else dead_endpoint
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{endpoint}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")  # whoever waits for an export waits for ever
    sink = open_sink("gateway", None)
    assert sink is not None
    sink.put([span(number + 1) for number in range(300)])  # more than a batch: an export begins
    if state == "hanging":
        collector.is_asked.wait()
    for _ in range(500):
        sink.put([span(1)] * 100)
    assert sink.num_dropped >= 50_000 - 32_768
    sink.close(timeout=0.2)
    assert not collector.requests


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_process_ends_though_its_collector_hangs(protocol: str, request: pytest.FixtureRequest) -> None:
    collector = request.getfixturevalue("grpc_collector" if protocol == "grpc" else "http_collector")
    collector.may_answer.clear()
    script = """
import os
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"], os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = ENDPOINT, PROTOCOL
from specsplit.core.span import Span
from specsplit.core.tracing import open_sink
sink = open_sink("gateway", None)
sink.put([Span("x", 1, 2, None, 1, 2)])
sink.close()
print("closed", flush=True)
"""
    script = script.replace("ENDPOINT, PROTOCOL", f"{collector.endpoint!r}, {protocol!r}")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
    assert collector.is_asked.is_set()


def test_a_collector_that_comes_back_gets_what_follows(grpc_collector: Collector, monkeypatch) -> None:
    """What was sent meanwhile is lost and counted, the rest goes on."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", grpc_collector.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    grpc_collector.may_answer.clear()
    sink = open_sink("gateway", None)
    assert sink is not None
    sink.put([span(1)] * 256)
    while not sink.num_dropped:  # the test's own timeout bounds it
        time.sleep(0.01)
    grpc_collector.may_answer.set()
    grpc_collector.requests.clear()
    sink.put([span(2)])
    sink.close(timeout=30)
    assert sink.num_dropped == 256
    assert 2 in numbers(grpc_collector.spans)


# --- the queue --------------------------------------------------------------------------------------------


class Slow:
    """An exporter that waits until it may go on."""

    def __init__(self) -> None:
        self.batches: list[list[Span]] = []
        self.is_exporting = threading.Event()
        self.may_go_on = threading.Event()
        self.is_closed = False

    def export(self, spans: Sequence[Span]) -> None:
        self.is_exporting.set()
        self.may_go_on.wait()
        self.batches.append(list(spans))

    def close(self) -> None:
        self.is_closed = True


def test_the_queue_is_bounded_and_what_does_not_fit_is_counted() -> None:
    exporter = Slow()
    sink = SpanSink(exporter, max_queued=1000)
    sink.put([span(1)] * 256)
    exporter.is_exporting.wait()
    sink.put([span(2)] * 600)
    sink.put([span(3)] * 600)
    sink.put([span(4)] * 600)
    assert sink.num_dropped == 200 + 600
    exporter.may_go_on.set()
    sink.close(timeout=30)
    exported = [s.span_id for batch in exporter.batches for s in batch]
    assert exported == [1] * 256 + [2] * 600 + [3] * 400
    assert max(map(len, exporter.batches)) == 256
    assert exporter.is_closed


def test_closing_gives_up_when_the_exporter_does_not_end() -> None:
    exporter = Slow()
    sink = SpanSink(exporter)
    sink.put([span(1)])
    sink.close(timeout=0)
    assert exporter.is_closed
    exporter.may_go_on.set()


def test_an_exporter_that_fails_is_asked_again_and_losses_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        def __init__(self) -> None:
            self.taken: list[Span] = []
            self.num_failures = 0

        def export(self, spans: Sequence[Span]) -> None:
            if self.num_failures < 3:
                self.num_failures += 1
                raise OSError("no space left")
            self.taken += spans

        def close(self) -> None:
            pass

    exporter = Failing()
    sink = SpanSink(exporter)
    sink.put([span(1)] * 256 * 5)
    sink.close(timeout=30)
    assert (sink.num_dropped, len(exporter.taken)) == (3 * 256, 2 * 256)
    assert sum("no space left" in record.message for record in caplog.records) == 1


def test_a_few_spans_leave_without_being_closed(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    sink = open_sink("drafter", path)
    assert sink is not None
    sink.put([span(1)])
    while not path.read_text():
        time.sleep(0.01)
    assert numbers(parse_spans(path.read_text())) == [1]
    sink.close(timeout=30)


# --- setting up -------------------------------------------------------------------------------------------


def test_no_destination_no_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads = threading.active_count()
    assert open_sink("gateway", None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")  # as good as unset
    assert open_sink("gateway", None) is None
    assert threading.active_count() == num_threads


def test_a_file_names_the_process(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    sinks = [open_sink(role, path) for role in ("gateway", "verifier", "verifier")]
    for number, sink in enumerate(sinks):
        assert sink is not None
        sink.put([span(number + 1)])
    for sink in sinks:
        assert sink is not None
        sink.close(timeout=30)
    resources = [
        {a.key: a.value.string_value for a in parse_line(line).resource_spans[0].resource.attributes}
        for line in path.read_text().splitlines()
    ]
    names = sorted(resource["service.name"] for resource in resources)
    assert names == ["specsplit-gateway", "specsplit-verifier", "specsplit-verifier"]
    assert len({resource["service.instance.id"] for resource in resources}) == 3


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"trace_file.*No such file") as caught:
        open_sink("gateway", tmp_path / "missing" / "traces.jsonl")
    assert caught.value.field == "trace_file"


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_an_unknown_protocol_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv(name, "http/json")
    with pytest.raises(SettingsError, match=rf"{name}.*http/json") as caught:
        open_sink("gateway", None)
    assert caught.value.field == name
