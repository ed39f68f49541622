"""What tracing costs the gateway: CPU time for each row in each step, exporting thread included.

    python benchmarks/tracing.py

Feeds a real `Tracing` with steps of 32 decoding rows, all drafted for, and with the ends of their requests.
Spans go to a file, then over OTLP to a receiver in another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from specsplit.core.trace_context import start_span
from specsplit.core.tracing import open_sink
from specsplit.core.types import Order, SamplingParams, StepDone, Usage, new_request_id
from specsplit.gateway.records import RequestRecord, RowRecord, StepRecord
from specsplit.gateway.request import AdmittedRequest
from specsplit.gateway.tracing import Tracing

NUM_ROWS = 32
NUM_STEPS = 100
NUM_ROUNDS = 5
STEP_MS = (200, 6)  # SmolLM2 on two CPU cores; an 8B model on a GPU
RECEIVER = """
import grpc, sys
from concurrent.futures import ThreadPoolExecutor
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb, trace_service_pb2_grpc as pb_grpc

class Receiver(pb_grpc.TraceServiceServicer):
    def Export(self, request, context):
        return pb.ExportTraceServiceResponse()

server = grpc.server(ThreadPoolExecutor(1))
pb_grpc.add_TraceServiceServicer_to_server(Receiver(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
"""


def new_request(*, ratio: float) -> AdmittedRequest:
    request_id = new_request_id()
    return AdmittedRequest(
        request_id=request_id,
        order=Order(0, 0, request_id),
        prompt_ids=range(256),
        sampling=SamplingParams(max_tokens=NUM_STEPS, seed=1),
        stop=(),
        k=4,
        trace=start_span("", ratio=ratio),
        model="smollm2-135m-instruct",
    )


def new_step(requests: list[AdmittedRequest], step_id: int) -> StepRecord:
    now = time.time_ns()
    batch = start_span("", ratio=1).traceparent
    return StepRecord(
        step_id=step_id,
        replica="127.0.0.1:50053",
        drafter="ngram",
        started_ns=now - 200_000_000,
        drafted_ns=now - 199_000_000,
        sent_ns=now - 198_000_000,
        answered_ns=now - 1_000_000,
        committed_ns=now,
        draft_us=500,
        draft_traceparent=batch,
        done=StepDone(
            step_id, (), 10, 180_000, 12_000, 1500, NUM_ROWS * 5, NUM_ROWS, 1000, traceparent=batch
        ),
        rows=tuple(RowRecord(r, 256 + step_id, 1, True, 4, 4, 2, 3, None) for r in requests),
    )


def new_end(request: AdmittedRequest) -> RequestRecord:
    now = time.time_ns()
    return RequestRecord(
        request=request,
        outcome="length",
        usage=Usage(256, NUM_STEPS, 0, 50, 200, 100, (50, 30, 20, 0)),
        output_ids=range(NUM_STEPS),
        admitted_ns=now - 10**10,
        opened_ns=now - 9 * 10**9,
        first_token_ns=now - 8 * 10**9,
        ended_ns=now,
        replicas=("127.0.0.1:50053",),
        drafter="ngram",
        num_opens=1,
        num_preempted=0,
        predicted_cached_tokens=None,
    )


def cpu_seconds(trace_file: Path | None, feed: Callable[[Tracing], None]) -> tuple[float, float]:
    """Of the process until all spans have left, and of the feeding thread."""
    sink = open_sink("gateway", trace_file)
    assert sink is not None
    started, process_started = time.thread_time(), time.process_time()
    feed(Tracing(sink))
    fed = time.thread_time() - started
    sink.close(timeout=60)
    assert not sink.num_dropped
    return time.process_time() - process_started, fed


def feed_steps(tracing: Tracing, steps: list[StepRecord]) -> None:
    """At the pace of a GPU, so that the exporting thread has its turns as it would have there."""
    for step in steps:
        time.sleep(STEP_MS[-1] / 1e3)
        tracing.stepped(step)


def feed_ends(tracing: Tracing, ends: list[RequestRecord]) -> None:
    for end in ends:
        tracing.ended(end)


def measure(name: str, trace_file: Path | None, *, ratio: float) -> None:
    """The best of some rounds: other work on the machine only adds."""
    steps_cpu, ends_cpu = [], []
    for _ in range(NUM_ROUNDS):
        requests = [new_request(ratio=ratio) for _ in range(NUM_ROWS)]
        steps = [new_step(requests, number) for number in range(NUM_STEPS)]
        ends = [new_end(request) for request in requests]
        steps_cpu.append(cpu_seconds(trace_file, partial(feed_steps, steps=steps)))
        ends_cpu.append(cpu_seconds(trace_file, partial(feed_ends, ends=ends)))
    (total, fed), (ended, _) = min(steps_cpu), min(ends_cpu)
    shares = ", ".join(f"{total / NUM_STEPS / ms * 1e5:.2f} % of {ms} ms" for ms in STEP_MS)
    per_row = 1e6 / (NUM_STEPS * NUM_ROWS)
    print(f"{name}, ratio {ratio:.0f}, CPU time:")
    print(f"  row and step: {total * per_row:.1f} us, {fed * per_row:.1f} of them in the step loop's thread")
    print(f"  step of {NUM_ROWS} rows: {total / NUM_STEPS * 1e3:.2f} ms, {shares}")
    print(f"  end of a request: {ended / NUM_ROWS * 1e6:.0f} us")


def main() -> None:
    for ratio in (0.0, 1.0):
        with tempfile.TemporaryDirectory() as folder:
            measure("file", Path(folder) / "traces.jsonl", ratio=ratio)
            num_bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
            print(f"  file: {num_bytes / (NUM_ROUNDS * NUM_STEPS * NUM_ROWS):.0f} bytes a row and step")
    command = [sys.executable, "-c", RECEIVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{int(receiver.stdout.readline())}"
        measure("OTLP over gRPC", None, ratio=1.0)


if __name__ == "__main__":
    main()
