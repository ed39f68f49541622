"""The gateway's metrics: what the records say, counted as they come, and the counters of the generator.

Runs after the fact, like all that observes; knows no HTTP. docs/metrics.md lists all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry

from specsplit.core.metrics import COUNTS, SECONDS, Histogram, PositionTally, Reading, Readings, Tally
from specsplit.core.types import RequestId
from specsplit.gateway.records import FINISHED, RequestRecord, RowRecord, StepRecord
from specsplit.gateway.request import AdmittedRequest

PREFIX = "specsplit_gateway_"
_REQUEST_SECONDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class Metrics:
    """An observer that counts. What it keeps of a request goes when the request has ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, help_text: str, bounds: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(registry, PREFIX + name, help_text, bounds)

        def tally(name: str, help_text: str, *labels: str) -> Tally:
            return Tally(registry, PREFIX + name, help_text, labels)

        def positions(name: str, help_text: str) -> PositionTally:
            return PositionTally(registry, PREFIX + name, help_text, ["drafter"])

        self._admitted_ns: dict[RequestId, int] = {}  # of requests that have no token yet
        self._last_token_ns: dict[RequestId, int] = {}  # of those that have

        self._requests = tally("requests_total", "Requests that have ended, by how.", "outcome")
        self._prompt_tokens = tally("prompt_tokens_total", "Prompt tokens of admitted requests.")
        self._generation_tokens = tally("generation_tokens_total", "Tokens that clients were given.")
        self._first_token = histogram(
            "time_to_first_token_seconds", "From admission to the first output token."
        )
        self._per_token = histogram(
            "time_per_output_token_seconds",
            "Time per output token after the first: tokens of one step share the time since the one before.",
        )
        self._duration = histogram(
            "request_duration_seconds",
            "From admission to the end, of requests that ended by themselves (stop, length).",
            _REQUEST_SECONDS,
        )
        self._queued = histogram("queue_seconds", "From admission until a verifier had opened the request.")

        self._steps = tally("steps_total", "Steps that a verifier has answered.", "verifier")
        self._rows = tally(
            "rows_total", "Rows whose verdict counted: prefill chunks, and rows that sampled.", "kind"
        )
        self._step_rows = histogram("step_rows", "Rows of a step whose verdict counted.", COUNTS)
        self._step_tokens = histogram("step_tokens", "Tokens of those rows, drafts included.", COUNTS)
        self._scheduling = histogram(
            "step_schedule_seconds", "Composing a step, and planning it where no drafts were asked for."
        )
        self._drafting = histogram(
            "step_draft_seconds", "Planning a step and waiting for its drafts; steps that asked for drafts."
        )
        self._verifying = histogram("step_verify_seconds", "From sending a step to its answer.")
        self._committing = histogram("step_commit_seconds", "Applying a step's answer.")
        self._idle = histogram(
            "verifier_idle_seconds", "Time that a verifier stood idle before a step, as it says itself."
        )

        self._granted = positions("granted_tokens_total", "Draft tokens that rows were allowed, by position.")
        self._drafted = positions("drafted_tokens_total", "Draft tokens that were verified, by position.")
        self._accepted = positions("accepted_tokens_total", "Draft tokens that were accepted, by position.")
        self._undrafted = tally(
            "rows_without_draft_total", "Decoding rows that had no draft, by why.", "reason"
        )

    def admitted(self, request: AdmittedRequest, *, at_ns: int) -> None:
        self._admitted_ns[request.request_id] = at_ns
        self._prompt_tokens.add(count=len(request.prompt_ids))

    def stepped(self, step: StepRecord) -> None:
        self._steps.add(step.replica)
        num_tokens = num_sampling = num_committed = 0
        for row in step.rows:
            num_tokens += row.num_tokens + row.drafted
            if row.is_sampling:
                num_sampling += 1
                num_committed += row.committed
                self._sampled(row, step.drafter or "none")
                self._committed(row, step.answered_ns)
        self._rows.add("prefill", count=len(step.rows) - num_sampling)
        self._rows.add("sampling", count=num_sampling)
        self._generation_tokens.add(count=num_committed)
        self._step_rows.observe(len(step.rows))
        self._step_tokens.observe(num_tokens)
        composing_ns = step.drafted_ns or step.started_ns
        if step.drafted_ns is not None:
            self._drafting.observe((step.drafted_ns - step.started_ns) * 1e-9)
        self._scheduling.observe((step.sent_ns - composing_ns) * 1e-9)
        self._verifying.observe((step.answered_ns - step.sent_ns) * 1e-9)
        self._committing.observe((step.committed_ns - step.answered_ns) * 1e-9)
        self._idle.observe(step.done.idle_us * 1e-6)

    def ended(self, record: RequestRecord) -> None:
        self._admitted_ns.pop(record.request.request_id, None)
        self._last_token_ns.pop(record.request.request_id, None)
        self._requests.add(record.outcome)
        if record.opened_ns is not None:
            self._queued.observe((record.opened_ns - record.admitted_ns) * 1e-9)
        if record.outcome in FINISHED:
            self._duration.observe((record.ended_ns - record.admitted_ns) * 1e-9)

    def _sampled(self, row: RowRecord, drafter: str) -> None:
        if row.granted:
            self._granted.add(drafter, length=row.granted)
        if row.drafted:
            self._drafted.add(drafter, length=row.drafted)
            self._accepted.add(drafter, length=row.accepted)
        if row.no_draft_reason is not None:
            self._undrafted.add(row.no_draft_reason.name.lower())

    def _committed(self, row: RowRecord, at_ns: int) -> None:
        """Tokens that come with the first one come no time after it."""
        request_id = row.request.request_id
        last_ns = self._last_token_ns.get(request_id)
        if last_ns is None:
            self._first_token.observe((at_ns - self._admitted_ns.pop(request_id)) * 1e-9)
            self._per_token.observe(0.0, row.committed - 1)
        else:
            self._per_token.observe((at_ns - last_ns) * 1e-9 / row.committed, row.committed)
        self._last_token_ns[request_id] = at_ns


def show_counters(
    registry: CollectorRegistry, read: Callable[[], Mapping[str, int]], verifiers: Sequence[str]
) -> None:
    """What the generator counts anyway; `verifiers` are the addresses, in the order of the settings."""
    Readings(registry, PREFIX, read, [*_COUNTERS, *_of_replicas(verifiers)])


def _of_replicas(verifiers: Sequence[str]) -> list[Reading]:
    return [
        Reading(f"replica_{index}_{key}", name, help_text, {"verifier": address})
        for key, name, help_text in (
            ("up", "verifier_up", "Whether the verifier takes steps."),
            ("requests", "verifier_requests", "Requests placed at the verifier."),
            ("free_blocks", "verifier_free_blocks", "KV blocks that it said are free."),
            ("cached_tokens", "cached_tokens_total", "Prompt tokens that it had cached when a request came."),
            (
                "predicted_cached_tokens",
                "predicted_cached_tokens_total",
                "Prompt tokens that routing expected it to have cached; 0 with a single verifier.",
            ),
        )
        for index, address in enumerate(dict.fromkeys(verifiers))
    ]


_COUNTERS = (
    Reading("requests_admitted", "admitted_requests_total", "Requests admitted."),
    *(
        Reading(
            f"requests_{phase}",
            "current_requests",
            "Requests at this moment: waiting for a verifier, being opened there, or running.",
            {"phase": phase},
        )
        for phase in ("waiting", "opening", "running")
    ),
    Reading("drafter_up", "drafter_up", "Whether a drafter is connected."),
    Reading("verifier_lost", "verifier_lost_total", "Streams to a verifier that broke."),
    Reading("preempted", "preemptions_total", "Requests that lost their KV blocks to others."),
    Reading("step_timeouts", "step_timeouts_total", "Steps that were not answered in time."),
    Reading("open_timeouts", "open_timeouts_total", "Opens that were not answered in time."),
    Reading("draft_timeouts", "draft_timeouts_total", "Batches that came too late for their step."),
    Reading(
        "draft_skipped_steps",
        "draft_skipped_steps_total",
        "Steps that asked for no drafts because an answer was still outstanding.",
    ),
    *(
        Reading(
            f"draft_{reason}",
            "unusable_drafts_total",
            "Rows of a drafter's answers that were not used: refused here, or what the drafter said.",
            {"reason": reason},
        )
        for reason in ("refused", "need_context", "invalid")
    ),
    *(
        Reading(
            f"routed_by_{source}",
            "routed_requests_total",
            "Requests placed at one of several verifiers, by what knew of their caches.",
            {"by": source},
        )
        for source in ("registry", "memory")
    ),
    *(
        Reading(
            key,
            "registry_lookups_total",
            "Lookups in the registry, by result; skipped are those not tried while its circuit is open.",
            {"result": result},
        )
        for key, result in (
            ("registry_lookups", "answered"),
            ("registry_lookup_timeouts", "timeout"),
            ("registry_lookup_errors", "error"),
            ("registry_lookup_skipped", "skipped"),
        )
    ),
    Reading(
        "registry_lookup_us",
        "registry_lookup_seconds_total",
        "Time that lookups took, those without an answer included.",
        unit=1e-6,
    ),
    Reading(
        "registry_circuit_open",
        "registry_circuit_open",
        "Whether the registry is not asked at the moment, because it did not answer.",
    ),
    Reading("own_ns", "step_own_seconds_total", "Time in planning and applying steps.", unit=1e-9),
    Reading("codec_us", "codec_seconds_total", "Time in converting messages.", unit=1e-6),
    Reading(
        "invariant_violations",
        "invariant_violations_total",
        "Broken promises of a peer or of this program; each one is a bug.",
    ),
)
