"""W3C Trace Context: which headers continue a trace, and who decides about its details."""

from __future__ import annotations

import pytest

from specsplit.core.trace_context import (
    TraceContext,
    new_span_id,
    parse_sampled,
    parse_traceparent,
    start_span,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (VALID, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-ff", True),  # flags that are not known yet, and sampled
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f"cc-{TRACE}-{SPAN}-01", True),  # a later version
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-adds", True),
        (f"cc-{TRACE}-{SPAN}-01-", True),
    ],
)
def test_valid_headers(header: str, is_sampled: bool) -> None:
    assert parse_traceparent(header) == TraceContext(int(TRACE, 16), int(SPAN, 16), is_sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        TRACE,
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-011",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE}-{SPAN}-01-more",  # version 00 ends here
        f"00-{TRACE}-{SPAN}-01-",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"ff-{TRACE}-{SPAN}-01",  # the version that never is
        f"0-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN.upper()}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f" {VALID}",
        f"{VALID} ",
        f"{VALID}\n",
        f"00-{'٣' * 32}-{SPAN}-01",  # digits, but not those
    ],
)
def test_other_headers_start_a_trace_of_their_own(header: str) -> None:
    assert parse_traceparent(header) is None
    root = start_span(header, ratio=1)
    assert root.parent_span_id is None
    assert root.trace_id != int(TRACE, 16)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("flags", ["00", "01"])
def test_the_caller_decides_about_details(flags: str, ratio: float) -> None:
    span = start_span(f"00-{TRACE}-{SPAN}-{flags}", ratio=ratio)
    assert (span.trace_id, span.parent_span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert span.span_id not in (0, span.parent_span_id)
    assert span.is_sampled is (flags == "01")


def test_the_ratio_decides_for_callers_without_a_trace() -> None:
    assert all(start_span("", ratio=1).is_sampled for _ in range(100))
    assert not any(start_span("", ratio=0).is_sampled for _ in range(100))
    # 20,000 draws at 0.1: six standard deviations are 255
    assert abs(sum(start_span("", ratio=0.1).is_sampled for _ in range(20_000)) - 2_000) < 255


def test_what_goes_out_names_the_span_and_comes_back() -> None:
    span = start_span(VALID, ratio=0)
    assert span.traceparent == f"00-{TRACE}-{span.span_id:016x}-01"
    assert parse_traceparent(span.traceparent) == TraceContext(span.trace_id, span.span_id, True)
    small = TraceContext(trace_id=1, span_id=2, is_sampled=False)
    assert small.traceparent == f"00-{1:032x}-{2:016x}-00"
    assert parse_traceparent(small.traceparent) == small


def test_services_keep_only_sampled_contexts() -> None:
    assert parse_sampled(VALID) == TraceContext(int(TRACE, 16), int(SPAN, 16), True)
    assert parse_sampled(f"00-{TRACE}-{SPAN}-00") is None
    assert parse_sampled("") is None


def test_ids_do_not_repeat() -> None:
    assert len({new_span_id() for _ in range(10_000)}) == 10_000
    assert len({start_span("", ratio=0).trace_id for _ in range(1_000)}) == 1_000
