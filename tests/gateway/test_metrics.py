"""The gateway's metrics: exact values from records, totals that equal the usages, and /metrics over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import httpx
import pytest
from gateway_bench import admitted, bench
from metrics_check import Everything, Scraped, documented, read
from prometheus_client import CollectorRegistry

from specsplit.core.metrics import new_registry
from specsplit.core.types import NoDraftReason, StepDone, Usage
from specsplit.gateway.api.http_server import HttpServer
from specsplit.gateway.api.openai_http import create_app
from specsplit.gateway.metrics import Metrics, show_counters
from specsplit.gateway.records import RequestRecord, RowRecord, StepRecord
from specsplit.gateway.request import AdmittedRequest
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.text.tokenizer import Tokenizer

P = "specsplit_gateway_"
MS = 1_000_000
T0 = 1_700_000_000 * 1000 * MS


class Feed:
    """Makes records and hands them to the metrics; times in milliseconds after the start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.metrics = Metrics(self.registry)
        self.num_steps = 0

    def seen(self) -> Scraped:
        return read(self.registry)

    def admit(self, prompt: int = 3, *, at: float = 0) -> AdmittedRequest:
        request = admitted(list(range(prompt)))
        self.metrics.admitted(request, at_ns=T0 + int(at * MS))
        return request

    def row(
        self,
        request: AdmittedRequest,
        committed: int,
        *,
        drafted: int = 0,
        accepted: int = 0,
        granted: int = 0,
        num_tokens: int = 1,
        reason: NoDraftReason | None = None,
    ) -> RowRecord:
        return RowRecord(request, 0, num_tokens, committed > 0, granted, drafted, accepted, committed, reason)

    def step(self, *rows: RowRecord, answered: float, drafted: float | None = None, idle_us: int = 0) -> None:
        """Began 10 ms before its answer and was sent 4 ms before it; applied 1 ms after."""
        self.num_steps += 1

        def at(ms: float) -> int:
            return T0 + int(ms * MS)

        self.metrics.stepped(
            StepRecord(
                step_id=self.num_steps,
                replica="10.0.0.1:50053",
                drafter="ngram",
                started_ns=at(answered - 10),
                drafted_ns=None if drafted is None else at(drafted),
                sent_ns=at(answered - 4),
                answered_ns=at(answered),
                committed_ns=at(answered + 1),
                draft_us=None,
                draft_traceparent="",
                done=StepDone(self.num_steps, (), 1, 2, 3, idle_us, 40, 7, 64),
                rows=rows,
            )
        )

    def end(self, request: AdmittedRequest, outcome: str, *, ended: float, opened: float | None = 2) -> None:
        self.metrics.ended(
            RequestRecord(
                request=request,
                outcome=outcome,
                usage=Usage(len(request.prompt_ids), 0, 0, 0, 0, 0, ()),
                output_ids=(),
                admitted_ns=T0,
                opened_ns=None if opened is None else T0 + int(opened * MS),
                first_token_ns=None,
                ended_ns=T0 + int(ended * MS),
                replicas=(),
                drafter="ngram",
                num_opens=1,
                num_preempted=0,
                predicted_cached_tokens=None,
            )
        )


@pytest.fixture
def feed() -> Feed:
    return Feed()


def buckets(seen: Scraped, name: str, bounds: Sequence[str]) -> list[float]:
    return [seen(f"{P}{name}_bucket", le=le) for le in bounds]


def test_a_run_of_five_is_five_tokens(feed: Feed) -> None:
    """Case 15: they share the time since the token before them."""
    request = feed.admit()
    feed.step(feed.row(request, 1), answered=100)
    feed.step(feed.row(request, 5, drafted=4, accepted=4), answered=200)
    name, seen = "time_per_output_token_seconds", feed.seen()
    assert seen(f"{P}{name}_count") == 5
    assert seen(f"{P}{name}_sum") == pytest.approx(0.1)
    assert buckets(seen, name, ["0.015", "0.025", "+Inf"]) == [0, 5, 5], "20 ms each"
    assert seen(f"{P}generation_tokens_total") == 6
    assert seen(f"{P}time_to_first_token_seconds_count") == 1
    assert seen(f"{P}time_to_first_token_seconds_sum") == pytest.approx(0.1)


def test_times_per_token_sum_to_the_time_after_the_first_token(feed: Feed) -> None:
    """Tokens that come with the first one come no time after it; another request changes nothing."""
    request, other = feed.admit(at=0), feed.admit(at=30)
    feed.step(feed.row(request, 3, drafted=2, accepted=2), answered=50)
    feed.step(feed.row(other, 1), feed.row(request, 1), answered=80)
    feed.step(feed.row(request, 4, drafted=4, accepted=3), answered=136)
    name, seen = "time_per_output_token_seconds", feed.seen()
    assert seen(f"{P}{name}_count") == 3 + 1 + 4 - 1
    assert seen(f"{P}{name}_sum") == pytest.approx(0.136 - 0.050)
    assert buckets(seen, name, ["0.0001", "0.015", "0.04", "+Inf"]) == [2, 6, 7, 7]
    assert seen(f"{P}time_to_first_token_seconds_sum") == pytest.approx(0.05 + 0.05)


def test_requests_by_outcome_and_their_times(feed: Feed) -> None:
    waits, fails = feed.admit(prompt=5), feed.admit(prompt=7)
    done = [feed.admit(prompt=2) for _ in range(2)]
    for request, outcome in zip(done, ("stop", "length"), strict=True):
        feed.step(feed.row(request, 1), answered=20)
        feed.end(request, outcome, ended=1500, opened=6)
    feed.end(waits, "cancelled", ended=9000, opened=None)
    feed.end(fails, "unavailable", ended=9000, opened=8)
    seen = feed.seen()
    for outcome in ("stop", "length", "cancelled", "unavailable"):
        assert seen(f"{P}requests_total", outcome=outcome) == 1
    assert seen(f"{P}prompt_tokens_total") == 5 + 7 + 2 + 2
    assert seen(f"{P}request_duration_seconds_count") == 2, "those that ended by themselves"
    assert seen(f"{P}request_duration_seconds_sum") == pytest.approx(3.0)
    assert seen(f"{P}queue_seconds_count") == 3, "one was never opened"
    assert seen(f"{P}queue_seconds_sum") == pytest.approx(0.006 + 0.006 + 0.008)


def test_what_was_drafted_and_accepted_by_position(feed: Feed) -> None:
    request = feed.admit()
    feed.step(
        feed.row(request, 3, granted=4, drafted=4, accepted=2),
        feed.row(request, 1, granted=4, drafted=1, accepted=0),
        feed.row(request, 1, granted=4, reason=NoDraftReason.NO_MATCH),
        feed.row(request, 1, reason=NoDraftReason.OFF),
        feed.row(request, 0, num_tokens=64),
        answered=20,
    )
    seen = feed.seen()

    def at(name: str) -> list[float]:
        return [seen(P + name, drafter="ngram", position=str(position)) for position in range(5)]

    assert at("granted_tokens_total") == [3, 3, 3, 3, 0]
    assert at("drafted_tokens_total") == [2, 1, 1, 1, 0]
    assert at("accepted_tokens_total") == [1, 1, 0, 0, 0]
    assert seen(f"{P}rows_without_draft_total", reason="no_match") == 1
    assert seen(f"{P}rows_without_draft_total", reason="off") == 1
    assert seen(f"{P}rows_total", kind="sampling") == 4
    assert seen(f"{P}rows_total", kind="prefill") == 1


def test_steps_their_sizes_and_their_phases(feed: Feed) -> None:
    request = feed.admit()
    feed.step(feed.row(request, 0, num_tokens=60), feed.row(request, 3, drafted=2), answered=20, idle_us=1500)
    feed.step(feed.row(request, 1), answered=40, drafted=37, idle_us=500)
    seen = feed.seen()
    assert seen(f"{P}steps_total", verifier="10.0.0.1:50053") == 2
    assert (seen(f"{P}step_rows_count"), seen(f"{P}step_rows_sum")) == (2, 3)
    assert (seen(f"{P}step_tokens_count"), seen(f"{P}step_tokens_sum")) == (2, 60 + 3 + 1)
    sums = {"schedule": 6 - 1, "draft": 7, "verify": 2 * 4, "commit": 2 * 1}
    for phase, milliseconds in sums.items():
        assert seen(f"{P}step_{phase}_seconds_sum") == pytest.approx(milliseconds / 1000), phase
    assert seen(f"{P}step_draft_seconds_count") == 1
    assert seen(f"{P}verifier_idle_seconds_sum") == pytest.approx(0.002)


def test_nothing_is_kept_of_requests_that_have_ended(feed: Feed) -> None:
    for number in range(1000):
        request = feed.admit()
        if number % 3:
            feed.step(feed.row(request, 2), answered=20)
        feed.end(request, ("stop", "cancelled")[number % 2], ended=30)
    assert not feed.metrics._admitted_ns
    assert not feed.metrics._last_token_ns
    num_series = sum(len(family.samples) for family in feed.seen().families)
    assert num_series < 350, "no label takes values from requests"


def everything() -> CollectorRegistry:
    """A registry in which every metric has a sample."""
    registry = new_registry("gateway", restarts=0)
    feed = Feed()
    feed.registry, feed.metrics = registry, Metrics(registry)
    show_counters(registry, Everything, ["10.0.0.1:50053"])
    request = feed.admit()
    feed.step(feed.row(request, 2, granted=1, drafted=1, accepted=1), answered=1, drafted=0)
    feed.step(feed.row(request, 1, reason=NoDraftReason.OFF), answered=1)
    feed.end(request, "stop", ended=2)
    return registry


def test_the_page_says_exactly_what_there_is() -> None:
    seen = read(everything())
    assert not seen.without_samples
    assert seen.described == documented("gateway")


def test_each_replica_is_shown_under_its_address() -> None:
    registry = CollectorRegistry(auto_describe=True)
    counters = {"replica_0_up": 1, "replica_1_up": 0, "replica_1_cached_tokens": 32}
    show_counters(registry, lambda: counters, ["a:1", "a:1", "b:1"])  # the second is no replica of its own
    seen = read(registry)
    assert seen(f"{P}verifier_up", verifier="a:1") == 1
    assert seen(f"{P}cached_tokens_total", verifier="b:1") == 32


# --- with the real engine and server ----------------------------------------------------------------------


async def test_metrics_of_real_requests_equal_their_usages(
    tiny_model_dir: Path, gateway_settings: GatewaySettings, byte_tokenizer: Tokenizer
) -> None:
    registry = new_registry("gateway", restarts=0)
    metrics = Metrics(registry)
    async with bench(tiny_model_dir, num_verifiers=2) as b:
        show_counters(registry, b.loop.counters, b.addresses)
        for k in (4, 0, 2):
            await b.text([5, 6, 7], max_tokens=23, k=k)
        b.reporter.flush()
        for record in b.recorder.requests:
            metrics.admitted(record.request, at_ns=record.admitted_ns)
        for step in b.recorder.steps:
            metrics.stepped(step)
        for record in b.recorder.requests:
            metrics.ended(record)
        app = create_app(b.loop, byte_tokenizer, gateway_settings, metrics=registry)
        server = HttpServer(app, host="127.0.0.1", port=0)
        await server.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            response = await client.get("/metrics")
        await server.stop()
    assert response.headers["content-type"].startswith("text/plain; version=")
    seen, records = Scraped(response.text), b.recorder.requests
    usages = [record.usage for record in records]
    assert seen(f"{P}requests_total", outcome="length") == len(usages) == 3
    assert seen(f"{P}prompt_tokens_total") == 9
    assert seen(f"{P}generation_tokens_total") == sum(u.completion_tokens for u in usages) == 69
    assert sum(seen(f"{P}steps_total", verifier=address) for address in b.addresses) == len(b.recorder.steps)

    def at_positions(name: str) -> list[float]:
        return [seen(P + name, drafter="scripted", position=str(position)) for position in range(4)]

    of_usages = zip_longest(*(u.accepted_by_position for u in usages), fillvalue=0)
    assert at_positions("accepted_tokens_total") == [sum(counts) for counts in of_usages]
    assert sum(at_positions("drafted_tokens_total")) == sum(u.drafted for u in usages)
    assert seen(f"{P}rows_without_draft_total", reason="off") == usages[1].steps - 1
    assert seen(f"{P}time_per_output_token_seconds_count") == 3 * 22
    after_first = sum(
        max(s.answered_ns for s in b.recorder.steps if any(r.request is record.request for r in s.rows))
        - (record.first_token_ns or 0)
        for record in records
    )
    assert seen(f"{P}time_per_output_token_seconds_sum") == pytest.approx(after_first * 1e-9)
    assert [seen(f"{P}verifier_up", verifier=address) for address in b.addresses] == [1, 1]
    assert seen(f"{P}current_requests", phase="running") == 0
    assert seen(f"{P}routed_requests_total", by="memory") == 3
    unknown = {name for name in seen.without_samples if "registry" not in name}
    assert not unknown, "counters that the generator does not have"


async def test_there_are_no_metrics_where_none_are_given(base_url: str) -> None:
    async with httpx.AsyncClient(base_url=base_url) as client:
        assert (await client.get("/metrics")).status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_metrics_can_only_be_read(
    generator: object, byte_tokenizer: Tokenizer, gateway_settings: GatewaySettings, method: str
) -> None:
    app = create_app(generator, byte_tokenizer, gateway_settings, metrics=everything())  # type: ignore[arg-type]
    server = HttpServer(app, host="127.0.0.1", port=0)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        assert (await client.request(method, "/metrics")).status_code == 405
        assert (await client.get("/metrics")).status_code == 200
    await server.stop()
