"""The trace file: valid OTLP, whole lines whoever writes, rotated without a loss."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from otlp_json import parse_line, parse_spans

from specsplit.core.span import Attributes, Span
from specsplit.core.trace_context import TraceContext
from specsplit.core.trace_file import SpanEncoder, TraceFile

RESOURCE: Attributes = {"service.name": "specsplit-test", "service.version": "1.2"}
TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0x00F067AA0BA902B7
WRITER = """
import sys
from pathlib import Path
from specsplit.core.span import Span
from specsplit.core.trace_file import TraceFile

path, writer, num_lines, max_bytes, num_kept = Path(sys.argv[1]), *map(int, sys.argv[2:])
file = TraceFile(path, {"service.version": "1"}, max_bytes=max_bytes, num_kept=num_kept)
print("ready", flush=True)
sys.stdin.read(1)
for line in range(num_lines):
    spans = [Span("x", writer + 1, line + 1, None, 1, 2, {"padding": "p" * (line * 37 % 3000)})] * 2
    file.export(spans)
file.close()
"""


def span(number: int = 1, **changes: object) -> Span:
    return Span("step", TRACE_ID, number, None, 10**18, 10**18 + number)._replace(**changes)  # type: ignore[arg-type]


def test_a_line_is_a_valid_request(tmp_path: Path) -> None:
    own = {
        "text": 'quotes " and \\ and ünïcödé \u2028 \U0001f600',
        "flag": True,
        "number": -(2**63),
        "real": 0.1,
        "whole": 2.0,
        "none": (),
        "words": ("a", "b"),
        "numbers": [1, 2, 3],
    }
    shared: Attributes = {"all%d": 1, "percent": 2}
    links = (TraceContext(3, 4, is_sampled=True), TraceContext(5, 6, is_sampled=True))
    spans = [
        span(
            SPAN_ID,
            parent_span_id=7,
            attributes=own,
            shared=shared,
            links=links,
            is_server=True,
            is_error=True,
        ),
        span(2, shared=shared, links=links),
        span(3, attributes={"%s": 5}),
        span(4),
    ]
    file = TraceFile(tmp_path / "traces.jsonl", RESOURCE)
    file.export(spans)
    file.close()
    (line,) = (tmp_path / "traces.jsonl").read_text().splitlines()
    (of_resource,) = parse_line(line).resource_spans
    assert {a.key: a.value.string_value for a in of_resource.resource.attributes} == RESOURCE
    (of_scope,) = of_resource.scope_spans
    assert (of_scope.scope.name, of_scope.scope.version) == ("specsplit", "1.2")
    full, second, third, bare = of_scope.spans
    assert (full.trace_id, full.span_id) == (TRACE_ID.to_bytes(16, "big"), SPAN_ID.to_bytes(8, "big"))
    assert full.parent_span_id == bytes([0] * 7 + [7])
    assert (full.name, full.kind, full.status.code) == ("step", full.SPAN_KIND_SERVER, 2)
    assert full.end_time_unix_nano - full.start_time_unix_nano == SPAN_ID
    values = {a.key: a.value for a in full.attributes}
    assert set(values) == {*own, *shared}
    assert values["text"].string_value == own["text"]
    assert values["flag"].bool_value is True
    assert values["number"].int_value == -(2**63)
    assert (values["real"].double_value, values["whole"].double_value) == (0.1, 2.0)
    assert values["whole"].WhichOneof("value") == "double_value"
    assert not values["none"].array_value.values
    assert [v.string_value for v in values["words"].array_value.values] == ["a", "b"]
    assert [v.int_value for v in values["numbers"].array_value.values] == [1, 2, 3]
    assert {a.key: a.value.int_value for a in second.attributes} == shared
    for linked in (full, second):
        assert [int.from_bytes(link.trace_id, "big") for link in linked.links] == [3, 5]
        assert [int.from_bytes(link.span_id, "big") for link in linked.links] == [4, 6]
    assert {a.key: a.value.int_value for a in third.attributes} == {"%s": 5}
    assert (bare.parent_span_id, list(bare.attributes), list(bare.links)) == (b"", [], [])
    assert (bare.kind, bare.status.code) == (bare.SPAN_KIND_INTERNAL, 0)


def test_ids_are_lower_case_hexadecimal_and_numbers_are_strings() -> None:
    (line,) = SpanEncoder(RESOURCE).lines([span(SPAN_ID, parent_span_id=1, attributes={"n": 1})])
    (encoded,) = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert encoded["traceId"] == "0af7651916cd43dd8448eb211c80319c"
    assert (encoded["spanId"], encoded["parentSpanId"]) == ("00f067aa0ba902b7", "0000000000000001")
    assert encoded["startTimeUnixNano"] == str(10**18)
    assert encoded["attributes"] == [{"key": "n", "value": {"intValue": "1"}}]


def test_long_lines_are_split() -> None:
    """The collector's receiver takes lines of 1 MiB."""
    spans = [span(number + 1, attributes={"text": "x" * 100_000}) for number in range(30)]
    lines = list(SpanEncoder(RESOURCE).lines(spans))
    assert max(map(len, lines)) < 2**20
    assert len(lines) < 10
    parsed = parse_spans(b"".join(lines).decode())
    assert [int.from_bytes(s.span_id, "big") for s in parsed] == list(range(1, 31))


def test_nothing_is_written_for_nothing(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "traces.jsonl", RESOURCE)
    file.export([])
    file.close()
    assert (tmp_path / "traces.jsonl").read_bytes() == b""


def files_of(path: Path) -> list[Path]:
    """Oldest first."""
    return sorted(
        path.parent.iterdir(), key=lambda p: int(p.suffix[1:] if p.suffix != ".jsonl" else 0), reverse=True
    )


def test_old_files_are_kept_up_to_a_number(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    file = TraceFile(path, RESOURCE, max_bytes=1000, num_kept=3)
    for number in range(1, 41):
        file.export([span(number)])
    file.close()
    assert [p.name for p in files_of(path)] == [f"traces.jsonl{end}" for end in (".3", ".2", ".1", "")]
    assert all(0 < p.stat().st_size <= 1000 for p in files_of(path))
    ids = [int.from_bytes(s.span_id, "big") for p in files_of(path) for s in parse_spans(p.read_text())]
    assert ids == list(range(ids[0], 41))


def test_a_removed_file_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    file = TraceFile(path, RESOURCE)
    file.export([span(1)])
    path.unlink()
    file.export([span(2)])
    file.close()
    assert [s.span_id[-1] for s in parse_spans(path.read_text())] == [2]


def test_processes_share_a_file_and_its_rotation(tmp_path: Path) -> None:
    """Four write at once: every line is whole and there once, in some file; each writer's stay in order."""
    path = tmp_path / "traces.jsonl"
    num_writers, num_lines, max_bytes, num_kept = 4, 300, 40_000, 1000
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, *map(str, (path, writer, num_lines, max_bytes, num_kept))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for writer in range(num_writers)
    ]
    for process in writers:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in writers:
        assert process.stdin is not None
        process.stdin.write(b"g")
        process.stdin.flush()
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    files = files_of(path)
    assert len(files) > 10
    seen: dict[int, list[int]] = {writer: [] for writer in range(num_writers)}
    for file in files:
        text = file.read_text()
        assert text.endswith("\n")
        for line in text.splitlines():
            first, second = parse_spans(line)
            assert first == second
            seen[int.from_bytes(first.trace_id, "big") - 1].append(int.from_bytes(first.span_id, "big"))
    assert seen == {writer: list(range(1, num_lines + 1)) for writer in range(num_writers)}


@pytest.mark.parametrize("room", [100, 1500, 4000])
def test_a_full_disk_leaves_whole_lines(tmp_path: Path, room: int) -> None:
    """A limit on the size of files cuts a write short and then fails it, as a disk does that is full."""
    script = """
import resource, sys
from pathlib import Path
from specsplit.core.span import Span
from specsplit.core.trace_file import TraceFile

path, room = Path(sys.argv[1]), int(sys.argv[2])
file = TraceFile(path, {"service.version": "1"})
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
for number in range(100):
    try:
        file.export([Span("x", 1, number + 1, None, 1, 2)])
    except OSError as error:
        print("refused", error.strerror)
        break
"""
    path = tmp_path / "traces.jsonl"
    done = subprocess.run([sys.executable, "-c", script, path, str(room)], capture_output=True, text=True)
    assert re.match("refused", done.stdout), done
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    assert len(text) <= room < len(text) + 400
    assert [s.span_id[-1] for s in parse_spans(text)] == list(range(1, len(text.splitlines()) + 1))
