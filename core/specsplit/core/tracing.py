"""Takes a process's finished spans and has a thread export them. Knows no format of theirs and no service.

Spans are made after the fact, from what was measured: there is no tracer. Nothing here can delay what is
traced: a queue that is full drops spans and counts them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, cast
from uuid import uuid4

from specsplit.core.errors import SettingsError
from specsplit.core.span import Attributes, Span
from specsplit.core.trace_file import TraceFile

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MAX_QUEUED = 32_768  # about 20 MB
_BATCH_SPANS = 256  # so few that whoever waits for the interpreter meanwhile does not wait long
_DELAY_SECONDS = 1.0  # the longest that a span waits for others to leave with
_WARN_SECONDS = 20.0
_CLOSE_SECONDS = 2.0  # for the last spans of a process to leave
_LAST_SECONDS = 0.5  # for an export that was told to break off


class Exporter(Protocol):
    def export(self, spans: Sequence[Span]) -> None:
        """May take its time; raises when the spans are lost."""
        ...

    def close(self) -> None:
        """Breaks off an export that still runs, as far as that can be done."""
        ...


class SpanSink:
    """Where spans go: a bounded queue and the thread that empties it. `close` ends it."""

    def __init__(self, exporter: Exporter, *, max_queued: int = _MAX_QUEUED) -> None:
        self._exporter = exporter
        self._max_queued = max_queued
        self._queue: deque[Span] = deque()
        self._num_refused = 0  # by `put`
        self._num_lost = 0  # by the thread
        self._warned_at: float | None = None
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Spans that nobody will see."""
        return self._num_refused + self._num_lost

    def put(self, spans: Sequence[Span]) -> None:
        """Never blocks; to be called by one thread."""
        room = self._max_queued - len(self._queue)
        if len(spans) > room:
            self._num_refused += len(spans) - room
            spans = spans[:room]
        self._queue.extend(spans)
        if len(self._queue) >= _BATCH_SPANS:
            self._wake.set()

    def close(self, *, timeout: float = _CLOSE_SECONDS) -> None:
        """Exports what is queued, unless that takes longer."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout)
        self._exporter.close()
        self._thread.join(_LAST_SECONDS)
        if self._queue:
            log.warning("tracing: %d spans were not exported in time", len(self._queue))

    # --- on the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            is_full = self._wake.wait(_DELAY_SECONDS)
            self._wake.clear()
            is_last = self._is_closing
            min_spans = _BATCH_SPANS if is_full and not is_last else 1
            while len(self._queue) >= min_spans:
                self._export()
            if is_last:
                return

    def _export(self) -> None:
        spans = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH_SPANS))]
        try:
            self._exporter.export(spans)
        except Exception as error:  # a full disk, a collector that is away: what is traced goes on
            self._num_lost += len(spans)
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        if self._warned_at is None or now - self._warned_at > _WARN_SECONDS:
            self._warned_at = now
            log.warning("tracing: %d spans lost so far; now: %s", self.num_dropped, error)


def num_dropped(sink: SpanSink | None) -> int:
    return 0 if sink is None else sink.num_dropped


def open_sink(role: str, trace_file: Path | None) -> SpanSink | None:
    """To a collector if the environment names one, else to the file; without either no span need be made.

    Raises SettingsError for a file that cannot be written and for a protocol that is not known.
    """
    if any(os.environ.get(name) for name in _ENDPOINTS):
        from specsplit.core.trace_otlp import OtlpExporter  # slow to import

        return SpanSink(OtlpExporter(_resource(role)))
    if trace_file is None:
        return None
    try:
        return SpanSink(TraceFile(trace_file, _resource(role)))
    except OSError as error:
        raise SettingsError(f"trace_file: {trace_file}: {error.strerror}", field="trace_file") from error


def _resource(role: str) -> Attributes:
    """Who speaks; OTEL_RESOURCE_ATTRIBUTES may add to it."""
    from opentelemetry.sdk.resources import Resource  # slow to import

    own = {
        "service.name": f"specsplit-{role}",
        "service.instance.id": str(uuid4()),
        "service.version": version("specsplit"),
    }
    return cast(Attributes, dict(Resource.create(own).attributes))
