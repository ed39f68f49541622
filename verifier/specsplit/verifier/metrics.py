"""The verifier's metrics: the device's events, counted as they pass the service, and the counters of others.

Runs on the event loop, never on the device thread; knows no gRPC. docs/metrics.md lists all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry

from specsplit.core.metrics import COUNTS, SECONDS, Histogram, PositionTally, Reading, Readings, Tally
from specsplit.core.types import Opened, OpenRequest, RequestId, RowDone, Status, Step, StepDone

PREFIX = "specsplit_verifier_"


class Asked:
    """What one stream has asked and was not told yet: the part of it that the answers do not repeat."""

    def __init__(self) -> None:
        self._num_tokens: dict[tuple[RequestId, int], int] = {}  # of each Open
        self._num_drafted: dict[
            int, dict[tuple[RequestId, int], int]
        ] = {}  # by Step, of each row with drafts

    def add(self, command: object) -> None:
        match command:
            case OpenRequest():
                num_tokens = len(command.prompt_ids) + len(command.output_ids)
                self._num_tokens[command.request_id, command.generation] = num_tokens
            case Step():
                self._num_drafted[command.step_id] = {
                    (row.request_id, row.base_len): len(row.draft_ids)
                    for row in command.rows
                    if row.draft_ids
                }

    def take_open(self, opened: Opened) -> int:
        return self._num_tokens.pop((opened.request_id, opened.generation), 0)

    def take_step(self, done: StepDone) -> Mapping[tuple[RequestId, int], int]:
        return self._num_drafted.pop(done.step_id, {})


class Metrics:
    def __init__(self, registry: CollectorRegistry, read: Callable[[], Mapping[str, int]]) -> None:
        """`read` gives the counters of device and publisher as far as they are there, from any thread."""
        Readings(registry, PREFIX, read, _COUNTERS)

        def histogram(name: str, help_text: str, bounds: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(registry, PREFIX + name, help_text, bounds)

        def tally(name: str, help_text: str) -> Tally:
            return Tally(registry, PREFIX + name, help_text)

        def positions(name: str, help_text: str) -> PositionTally:
            return PositionTally(registry, PREFIX + name, help_text)

        self._batch_rows = histogram("batch_rows", "Rows that ran together; gateways share a batch.", COUNTS)
        self._batch_tokens = histogram("batch_tokens", "Tokens that ran together, drafts included.", COUNTS)
        self._forward = histogram("forward_seconds", "The model's time for a batch.")
        self._sample = histogram("sample_seconds", "Sampling, acceptance and committing of a batch.")
        self._idle = histogram("idle_seconds", "Time without work before a batch, while requests were open.")
        self._queue = histogram("queue_seconds", "From the arrival of a step until it began to run.")
        self._committed = tally("committed_tokens_total", "Tokens committed by rows that sampled.")
        self._drafted = positions("drafted_tokens_total", "Draft tokens decided about, by position.")
        self._accepted = positions("accepted_tokens_total", "Draft tokens accepted, by position.")
        self._queried = tally(
            "prefix_cache_queried_tokens_total", "Tokens of opened requests, looked up in the prefix cache."
        )
        self._hit = tally("prefix_cache_hit_tokens_total", "Tokens of opened requests that were cached.")

    def batch(self, done: StepDone) -> None:
        """Once for each batch; all its steps say the same of it. One whose rows were all refused is none."""
        if not done.batch_rows:
            return
        self._batch_rows.observe(done.batch_rows)
        self._batch_tokens.observe(done.batch_tokens)
        self._forward.observe(done.forward_us * 1e-6)
        self._sample.observe(done.sample_us * 1e-6)
        self._idle.observe(done.idle_us * 1e-6)

    def answered(self, asked: Asked, event: object) -> None:
        """An event on its way to the stream that `asked`."""
        match event:
            case Opened():
                num_tokens = asked.take_open(event)
                if event.status is Status.OK:
                    self._queried.add(count=num_tokens)
                    self._hit.add(count=event.cached_tokens)
            case StepDone():
                self._queue.observe(event.queue_us * 1e-6)
                self._decided(asked.take_step(event), event.rows)

    def _decided(self, num_drafted: Mapping[tuple[RequestId, int], int], rows: Iterable[RowDone]) -> None:
        num_committed = 0
        for row in rows:
            if row.status is not Status.OK or row.is_replay:  # a verdict counts once
                continue
            num_committed += len(row.committed_ids)
            if drafted := num_drafted.get((row.request_id, row.base_len)):
                self._drafted.add(length=drafted)
                self._accepted.add(length=row.num_accepted)
        self._committed.add(count=num_committed)


_STATUSES = [status.name.lower() for status in Status]
_COUNTERS = (
    Reading("steps", "steps_total", "Steps of all streams."),
    Reading("batches", "batches_total", "Batches that those steps were merged into."),
    *(
        Reading(f"rows_{status}", "rows_total", "Rows of steps, by verdict.", {"status": status})
        for status in _STATUSES
    ),
    *(
        Reading(f"opens_{status}", "opens_total", "Opens, by answer.", {"status": status})
        for status in _STATUSES
    ),
    Reading("replays", "replays_total", "Rows that were asked again and told their last verdict."),
    Reading("preemptions", "preemptions_total", "Requests that lost their KV blocks to others."),
    Reading("step_failures", "step_failures_total", "Batches that failed; their rows are `internal`."),
    Reading("total_blocks", "blocks", "KV blocks in all."),
    Reading("free_blocks", "free_blocks", "KV blocks that no request holds, cached ones included."),
    Reading("cached_blocks", "cached_blocks", "KV blocks found by the prefix cache, held or not."),
    Reading("open_requests", "open_requests", "Requests that are open."),
    Reading("streams", "streams", "Streams of gateways."),
    Reading("is_draining", "draining", "Whether nothing new is opened, before the process ends."),
    Reading("registry_connected", "registry_connected", "Whether the registry answered last."),
    Reading("registry_registered", "registry_registered", "Whether this replica is registered there."),
    Reading("registry_published_blocks", "registry_blocks", "KV blocks that are to be published."),
    Reading("registry_pending", "registry_pending_changes", "Changes that were not published yet."),
    Reading("registry_applies", "registry_applies_total", "Batches of changes sent to the registry."),
    Reading("registry_snapshots", "registry_snapshots_total", "Whole snapshots sent to it."),
    Reading(
        "registry_gaps",
        "registry_gaps_total",
        "Times that the registry did not have what was published before; a snapshot follows.",
    ),
    Reading(
        "registry_registrations", "registry_registrations_total", "Times registered, the first included."
    ),
    Reading(
        "registry_superseded",
        "registry_superseded_total",
        "Times that another process registered under this replica's address.",
    ),
    Reading("registry_errors", "registry_errors_total", "Attempts that the registry did not answer."),
    Reading(
        "invariant_violations",
        "invariant_violations_total",
        "Broken promises of a peer or of this program; each one is a bug.",
    ),
)
