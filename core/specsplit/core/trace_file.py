"""Appends spans to a file as OTLP JSON lines, and rotates it; many processes may share it. Knows no service.

https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/: an ExportTraceServiceRequest a line, ids in
hexadecimal, 64-bit integers as strings. What is older than `traces.jsonl` is in `traces.jsonl.1`, then `.2`.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from specsplit.core.span import SCOPE, Attributes, Span, Value
from specsplit.core.trace_context import TraceContext

_MAX_FILE_BYTES = 64 * 1024 * 1024
_NUM_KEPT = 3
_MAX_LINE_CHARS = 512 * 1024  # the collector's otlpjsonfile receiver takes lines of 1 MiB

_Common: TypeAlias = tuple[str, int, int, bool, bool, int, int]


class TraceFile:
    """Exports to `path`; beside it stay the last `num_kept` files that had become `max_bytes` long."""

    def __init__(
        self,
        path: Path,
        resource: Attributes,
        *,
        max_bytes: int = _MAX_FILE_BYTES,
        num_kept: int = _NUM_KEPT,
    ) -> None:
        self._path = path
        self._encoder = SpanEncoder(resource)
        self._max_bytes = max_bytes
        self._num_kept = num_kept
        self._in_use = threading.Lock()
        self._fd = self._open()

    def export(self, spans: Sequence[Span]) -> None:
        with self._in_use:
            for line in self._encoder.lines(spans):
                self._append(line)

    def close(self) -> None:
        """An export that still runs (it waits for the lock of a stopped process) keeps the file."""
        if self._in_use.acquire(blocking=False):
            os.close(self._fd)

    def _append(self, line: bytes) -> None:
        """One at a time among all processes, so that neither a rotation nor a short write tears a line."""
        self._lock_current()
        try:
            size = os.fstat(self._fd).st_size
            if size and size + len(line) > self._max_bytes:
                self._rotate()
                self._lock_current()
                size = os.fstat(self._fd).st_size
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:  # the disk is full
                os.ftruncate(self._fd, size)
                raise
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock_current(self) -> None:
        """Locks the file that has the name now: another process may have renamed the one that is open."""
        while True:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                if os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                    return
            except FileNotFoundError:  # renamed just now, or removed by somebody
                pass
            current = self._open()
            os.close(self._fd)
            self._fd = current

    def _rotate(self) -> None:
        """Nobody else renames: that takes the lock on the file that has the name."""
        paths = [self._path]
        paths += (self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._num_kept + 1))
        for older, newer in zip(paths[:0:-1], paths[-2::-1], strict=True):
            if newer.exists():
                newer.replace(older)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


class SpanEncoder:
    """Puts the text together by hand: making objects for `json` to encode takes several times as long."""

    def __init__(self, resource: Attributes) -> None:
        version = json.dumps(resource["service.version"])
        self._head = (
            f'{{"resourceSpans":[{{"resource":{{"attributes":[{_attributes(resource)}]}},'
            f'"scopeSpans":[{{"scope":{{"name":"{SCOPE}","version":{version}}},"spans":['
        )

    def lines(self, spans: Sequence[Span]) -> Iterator[bytes]:
        """As few as the length of a line allows."""
        encoded: list[str] = []
        num_chars = 0
        known: dict[_Common, str] = {}
        for span in spans:
            text = _span(span, known)
            if encoded and num_chars + len(text) > _MAX_LINE_CHARS:
                yield self._line(encoded)
                encoded, num_chars = [], 0
            encoded.append(text)
            num_chars += len(text)
        if encoded:
            yield self._line(encoded)

    def _line(self, encoded: list[str]) -> bytes:
        return f"{self._head}{','.join(encoded)}]}}]}}]}}\n".encode("ascii")


def _span(span: Span, known: dict[_Common, str]) -> str:
    common = (  # ids of objects that the spans keep alive
        *(span.name, span.start_ns, span.end_ns, span.is_server, span.is_error),
        *(id(span.links), id(span.shared)),
    )
    rest = known.get(common) or known.setdefault(common, _rest(span))
    own = _attributes(span.attributes) if span.attributes else ""
    comma = "," if own and span.shared else ""
    parent = "" if span.parent_span_id is None else f'"parentSpanId":"{span.parent_span_id:016x}",'
    ids = f'"traceId":"{_trace_id(span.trace_id)}","spanId":"{span.span_id:016x}",{parent}'
    return f"{{{ids}{rest}{comma}{own}]}}"


def _rest(span: Span) -> str:
    """All but what distinguishes the spans of one step; open at its end for attributes."""
    status = '"status":{"code":2},' if span.is_error else ""
    return (
        f'"name":{_quoted(span.name)},"kind":{2 if span.is_server else 1},{status}'
        f'"startTimeUnixNano":"{span.start_ns}","endTimeUnixNano":"{span.end_ns}",'
        f'{_links(span.links)}"attributes":[{_attributes(span.shared)}'
    )


_quoted = lru_cache(maxsize=1024)(json.dumps)  # of names and keys: they are few
_trace_id = lru_cache(maxsize=4096)("{:032x}".format)  # of requests that run: each is in many spans


def _attributes(attributes: Attributes) -> str:
    values = attributes.values()
    if set(map(type, values)) == {int}:  # those of a row; half the time of what follows
        return _int_attributes(tuple(attributes)) % tuple(values)
    return ",".join(
        [f'{{"key":{_quoted(key)},"value":{_value(value)}}}' for key, value in attributes.items()]
    )


@lru_cache(maxsize=128)
def _int_attributes(keys: tuple[str, ...]) -> str:
    """A template for their values."""
    quoted = [json.dumps(key).replace("%", "%%") for key in keys]
    return ",".join([f'{{"key":{key},"value":{{"intValue":"%d"}}}}' for key in quoted])


def _value(value: Value) -> str:
    match value:
        case bool():
            return f'{{"boolValue":{"true" if value else "false"}}}'
        case int():
            return f'{{"intValue":"{value}"}}'
        case float():
            return f'{{"doubleValue":{json.dumps(value, allow_nan=False)}}}'
        case str():
            return f'{{"stringValue":{json.dumps(value)}}}'
        case _:
            return f'{{"arrayValue":{{"values":[{",".join(map(_value, value))}]}}}}'


def _links(links: Sequence[TraceContext]) -> str:
    if not links:
        return ""
    encoded = [f'{{"traceId":"{_trace_id(link.trace_id)}","spanId":"{link.span_id:016x}"}}' for link in links]
    return f'"links":[{",".join(encoded)}],'
