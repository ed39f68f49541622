"""Metrics that count elsewhere and are made when scraped, and the endpoint that serves them."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from random import Random

import httpx
import pytest
from metrics_check import read, scrape
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.registry import DuplicateTimeseries

from specsplit.core import metrics_http
from specsplit.core.errors import Unavailable
from specsplit.core.metrics import (
    SECONDS,
    Histogram,
    PositionTally,
    Reading,
    Readings,
    Tally,
    new_registry,
)
from specsplit.core.metrics_http import serve_metrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return new_registry("example", restarts=3)


@pytest.fixture
def address(registry: CollectorRegistry) -> Iterator[str]:
    with serve_metrics(registry, host="127.0.0.1", port=0) as address:
        yield address


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def test_every_service_says_what_runs_and_how_often_it_was_restarted(registry: CollectorRegistry) -> None:
    seen = read(registry)
    assert seen("specsplit_example_restarts_total") == 3
    (name,) = [family.name for family in seen.families if family.name.startswith("specsplit_build")]
    assert seen.described[name][1] == ("service", "version")
    assert seen("process_open_fds") > 0
    assert seen("process_resident_memory_bytes") > 1e6


def test_an_observation_may_stand_for_many(registry: CollectorRegistry) -> None:
    histogram = Histogram(registry, "specsplit_example_gap_seconds", "Gap.", (0.1, 0.2))
    histogram.observe(0.1, 5)  # a bound belongs to its own bucket
    histogram.observe(0.15)
    histogram.observe(3.0, 2)
    histogram.observe(0.0, 0)
    seen, name = read(registry), "specsplit_example_gap_seconds"
    assert [seen(f"{name}_bucket", le=le) for le in ("0.1", "0.2", "+Inf")] == [5, 6, 8]
    assert seen(f"{name}_count") == 8
    assert seen(f"{name}_sum") == pytest.approx(0.5 + 0.15 + 6.0)


def test_a_histogram_counts_as_the_library_does(registry: CollectorRegistry) -> None:
    import prometheus_client

    ours = Histogram(registry, "specsplit_example_ours", "Ours.", SECONDS)
    theirs = prometheus_client.Histogram("specsplit_example_theirs", "T.", registry=registry, buckets=SECONDS)
    random = Random(1)
    for value in [*SECONDS, *(random.expovariate(1) for _ in range(500))]:
        ours.observe(value)
        theirs.observe(value)
    seen = read(registry)
    for bound in [*map(str, SECONDS), "+Inf"]:
        assert seen("specsplit_example_ours_bucket", le=bound) == seen(
            "specsplit_example_theirs_bucket", le=bound
        )
    assert seen("specsplit_example_ours_sum") == pytest.approx(seen("specsplit_example_theirs_sum"))


def test_counters_by_label_and_by_position(registry: CollectorRegistry) -> None:
    plain = Tally(registry, "specsplit_example_plain_total", "Plain.")
    seen = read(registry)
    assert seen.described["specsplit_example_plain_total"] == ("counter", (), "Plain.")
    assert "specsplit_example_plain_total" not in seen.without_samples, "a counter begins at 0"
    tally = Tally(registry, "specsplit_example_ends_total", "Ends.", ["how"])
    positions = PositionTally(registry, "specsplit_example_drafts_total", "Drafts.", ["drafter"])
    plain.add(count=7)
    tally.add('odd "value"\\\n')
    tally.add("stop", count=2)
    for length in (3, 1, 0, 3):
        positions.add("ngram", length=length)
    seen = read(registry)
    assert seen("specsplit_example_plain_total") == 7
    assert seen("specsplit_example_ends_total", how="stop") == 2
    assert seen("specsplit_example_ends_total", how='odd "value"\\\n') == 1
    at = [seen("specsplit_example_drafts_total", drafter="ngram", position=str(p)) for p in range(4)]
    assert at == [3, 2, 2, 0]


def test_readings_are_read_when_scraped_and_missing_ones_left_out(registry: CollectorRegistry) -> None:
    numbers = {"waiting": 1, "time_us": 250_000}
    Readings(
        registry,
        "specsplit_example_",
        lambda: numbers,
        [
            Reading("waiting", "requests", "Requests.", {"phase": "waiting"}),
            Reading("running", "requests", "Requests.", {"phase": "running"}),
            Reading("time_us", "time_seconds_total", "Time.", unit=1e-6),
            Reading("absent", "absent_total", "Not there yet."),
        ],
    )
    numbers["waiting"] = 4
    seen = read(registry)
    assert seen("specsplit_example_requests", phase="waiting") == 4
    assert seen("specsplit_example_time_seconds_total") == 0.25
    assert seen.described["specsplit_example_requests"][0] == "gauge"
    assert seen.without_samples == {"specsplit_example_absent_total"}
    numbers["running"] = 2
    assert read(registry)("specsplit_example_requests", phase="running") == 2


def test_two_metrics_of_one_name_are_refused(registry: CollectorRegistry) -> None:
    Tally(registry, "specsplit_example_steps_total", "Steps.", ["a"])
    with pytest.raises(DuplicateTimeseries):
        Readings(registry, "specsplit_example_", dict, [Reading("steps", "steps_total", "Steps.")])
    with pytest.raises(DuplicateTimeseries):
        Histogram(registry, "specsplit_example_steps", "Steps.", (1,))


def test_counting_goes_on_while_it_is_scraped(registry: CollectorRegistry) -> None:
    """The scrape is on another thread: it sees some state, fails never and loses no count."""
    tally = Tally(registry, "specsplit_example_ends_total", "Ends.", ["how"])
    positions = PositionTally(registry, "specsplit_example_drafts_total", "Drafts.", ["drafter"])
    histogram = Histogram(registry, "specsplit_example_gap_seconds", "Gap.", SECONDS)
    is_done = threading.Event()
    failures: list[BaseException] = []

    def scrape_all_the_time() -> None:
        while not is_done.is_set():
            try:
                read(registry)
            except BaseException as error:
                failures.append(error)
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    scraper = threading.Thread(target=scrape_all_the_time)
    try:
        scraper.start()
        for number in range(20_000):
            tally.add(f"how-{number % 50}-{number // 5000}")
            positions.add(f"drafter-{number % 7}-{number // 5000}", length=number % 33)
            histogram.observe(number % 11)
    finally:
        is_done.set()
        scraper.join()
        sys.setswitchinterval(interval)
    assert not failures
    seen = read(registry)
    assert (
        sum(seen("specsplit_example_ends_total", how=f"how-{n}-{k}") for n in range(50) for k in range(4))
        == 20_000
    )
    assert seen("specsplit_example_gap_seconds_count") == 20_000


# --- over HTTP --------------------------------------------------------------------------------------------


def test_both_text_formats_are_served(registry: CollectorRegistry, address: str) -> None:
    Tally(registry, "specsplit_example_ends_total", "Ends.", ["how"]).add("stop")
    Histogram(registry, "specsplit_example_gap_seconds", "Gap.", (1,)).observe(0.5)
    assert scrape(address)("specsplit_example_ends_total", how="stop") == 1
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    response = httpx.get(f"http://{address}/metrics", headers=accept)
    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(response.text)}
    assert {"specsplit_example_ends", "specsplit_example_gap_seconds", "specsplit_build"} <= names


@pytest.mark.parametrize(("path", "status"), [("/", 404), ("/metricsx", 404), ("/metrics?a=b", 200)])
def test_only_the_metrics_are_there(address: str, path: str, status: int) -> None:
    assert httpx.get(f"http://{address}{path}").status_code == status


def test_an_ipv6_address_is_bound() -> None:
    try:
        with serve_metrics(CollectorRegistry(), host="::1", port=0) as address:
            assert address.startswith("[::1]:")
            assert httpx.get(f"http://{address}/metrics").status_code == 200
    except Unavailable as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_a_taken_port_is_a_typed_error_that_names_the_setting(address: str) -> None:
    with (
        pytest.raises(Unavailable, match=r"metrics_port: cannot listen on 127\.0\.0\.1:") as caught,
        serve_metrics(CollectorRegistry(), host="127.0.0.1", port=int(address.split(":")[1])),
    ):
        pass
    assert caught.value.field == "metrics_port"


def test_the_port_is_free_again_afterwards() -> None:
    with serve_metrics(CollectorRegistry(), host="127.0.0.1", port=0) as address:
        scrape_socket = connect(address)
    port = int(address.split(":")[1])
    with serve_metrics(CollectorRegistry(), host="127.0.0.1", port=port) as again:
        assert again == address
    scrape_socket.close()


def test_hanging_connections_delay_no_scrape(address: str) -> None:
    """Some say nothing, some half a request, some never read what they asked for."""
    beginnings = (
        b"",
        b"GET /metr",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
        b"GET /metrics HTTP/1.0\r\n\r\n",
    )
    hanging = [connect(address) for _ in range(40)]
    for number, one in enumerate(hanging):
        one.sendall(beginnings[number % len(beginnings)])
    for _ in range(3):
        assert scrape(address)("specsplit_example_restarts_total") == 3
    for one in hanging:
        one.close()


def test_a_silent_client_is_hung_up_on(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_http._Handler, "timeout", 0.05)
    with serve_metrics(registry, host="127.0.0.1", port=0) as address, connect(address) as silent:
        silent.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert silent.recv(1) == b"", "closed by the server"
        assert scrape(address)("specsplit_example_restarts_total") == 3


def test_garbage_harms_nobody(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    random = Random(0)
    beginnings = (b"", b"GET /metrics HTTP/1.1\r\nA: ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01")
    for size in (1, 100, 70_000):
        for beginning in beginnings:
            with connect(address) as one:
                try:
                    one.sendall(beginning + random.randbytes(size))
                    one.shutdown(socket.SHUT_WR)
                    while one.recv(65536):
                        pass
                except OSError:  # it may hang up while we still send
                    pass
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert httpx.request(method, f"http://{address}/metrics").status_code == 501
    assert scrape(address)("specsplit_example_restarts_total") == 3
    assert "Traceback" not in capfd.readouterr().err
