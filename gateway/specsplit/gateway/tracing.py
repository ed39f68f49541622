"""Makes spans of what the loop recorded: of each request, and when it is sampled of its steps and chunks.

Runs after the fact; knows no exporter. Attributes are OpenTelemetry's `gen_ai.*` where there is one, else
`specsplit.*`; docs/tracing.md lists them. No text of a prompt or an output is ever in a span unless `decode`
is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from specsplit.core.span import Attributes, Span, Value
from specsplit.core.trace_context import TraceContext, new_span_id, parse_traceparent
from specsplit.core.tracing import SpanSink
from specsplit.core.types import NoDraftReason, TokenIds
from specsplit.gateway.records import FINISHED, RequestRecord, RowRecord, StepRecord
from specsplit.gateway.request import AdmittedRequest

_NOT_ERRORS = (*FINISHED, "cancelled")


class Tracing:
    """An observer that makes spans; `decode`, when texts are to be recorded, makes text of token ids."""

    def __init__(self, sink: SpanSink, *, decode: Callable[[TokenIds], str] | None = None) -> None:
        self._sink = sink
        self._decode = decode

    def admitted(self, request: AdmittedRequest, *, at_ns: int) -> None:
        """Its span is made when it has ended."""

    def stepped(self, step: StepRecord) -> None:
        rows = [row for row in step.rows if row.request.trace.is_sampled]
        if not rows:
            return
        of_step, of_draft = _step_attributes(step), _draft_attributes(step)
        draft_links, verify_links = _links(step.draft_traceparent), _links(step.done.traceparent)
        spans: list[Span] = []
        for row in rows:
            trace_id, request_span = row.request.trace.trace_id, row.request.trace.span_id
            own, attributes = new_span_id(), _row_attributes(row)
            times = step.started_ns, step.committed_ns
            if row.num_tokens > 1 or not row.is_sampling:
                spans.append(
                    Span("prefill", trace_id, own, request_span, *times, attributes, of_step, verify_links)
                )
                continue
            spans.append(Span("step", trace_id, own, request_span, *times, attributes, of_step))
            if step.drafted_ns is not None and row.granted:
                times = step.started_ns, step.drafted_ns
                spans.append(Span("draft", trace_id, new_span_id(), own, *times, of_draft, links=draft_links))
            times = step.sent_ns, step.answered_ns
            spans.append(Span("verify", trace_id, new_span_id(), own, *times, links=verify_links))
        self._sink.put(spans)

    def ended(self, record: RequestRecord) -> None:
        request, trace = record.request, record.request.trace
        attributes = _request_attributes(record)
        if self._decode is not None:
            attributes["gen_ai.input.messages"] = _message("user", self._decode(request.prompt_ids))
            attributes["gen_ai.output.messages"] = _message(
                "assistant", self._decode(record.output_ids), finish_reason=record.outcome
            )
        span = Span(
            name=f"{_operation(request)} {request.model}",
            trace_id=trace.trace_id,
            span_id=trace.span_id,
            parent_span_id=trace.parent_span_id,
            start_ns=record.admitted_ns,
            end_ns=record.ended_ns,
            attributes=attributes,
            is_server=True,
            is_error=record.outcome not in _NOT_ERRORS,
        )
        self._sink.put((span,))


def _step_attributes(step: StepRecord) -> Attributes:
    done = step.done
    attributes: dict[str, Value] = {
        "specsplit.step_id": step.step_id,
        "specsplit.replica": step.replica,
        "specsplit.batch_rows": done.batch_rows,
        "specsplit.batch_tokens": done.batch_tokens,
        "specsplit.queue_us": done.queue_us,
        "specsplit.forward_us": done.forward_us,
        "specsplit.sample_us": done.sample_us,
        "specsplit.idle_us": done.idle_us,
    }
    if step.drafter:
        attributes["specsplit.drafter"] = step.drafter
    return attributes


def _draft_attributes(step: StepRecord) -> Attributes:
    """No time of its own means that the drafter did not answer in time."""
    return {} if step.draft_us is None else {"specsplit.draft_us": step.draft_us}


def _row_attributes(row: RowRecord) -> Attributes:
    attributes: dict[str, Value] = {
        "specsplit.base_len": row.base_len,
        "specsplit.num_tokens": row.num_tokens,
        "specsplit.granted": row.granted,
        "specsplit.drafted": row.drafted,
        "specsplit.accepted": row.accepted,
        "specsplit.committed": row.committed,
    }
    if row.no_draft_reason is not None:
        attributes["specsplit.no_draft_reason"] = _word(row.no_draft_reason)
    return attributes


def _request_attributes(record: RequestRecord) -> dict[str, Value]:
    """Totals that no sampling loses; what never came about is left out."""
    request, usage, sampling = record.request, record.usage, record.request.sampling
    is_finished = record.outcome in FINISHED
    optional: dict[str, Value | None] = {
        "gen_ai.request.top_k": float(sampling.top_k) or None,  # a double by convention; 0 is off
        "gen_ai.response.finish_reasons": (record.outcome,) if is_finished else None,
        "error.type": None if record.outcome in _NOT_ERRORS else record.outcome,
        "specsplit.drafter": record.drafter or None,
        "specsplit.predicted_cached_tokens": record.predicted_cached_tokens,
        "specsplit.no_draft_reason": None if usage.no_draft_reason is None else _word(usage.no_draft_reason),
        "specsplit.queue_us": _microseconds(record.admitted_ns, record.opened_ns),
        "specsplit.ttft_us": _microseconds(record.admitted_ns, record.first_token_ns),
        "specsplit.decode_us": _microseconds(record.first_token_ns, record.ended_ns),
    }
    return {
        "gen_ai.operation.name": _operation(request),
        "gen_ai.provider.name": "specsplit",
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": _signed(sampling.seed),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "specsplit.request_id": request.request_id.hex(),
        "specsplit.outcome": record.outcome,
        "specsplit.priority": request.order.priority,
        "specsplit.k": request.k,
        "specsplit.steps": usage.steps,
        "specsplit.drafted": usage.drafted,
        "specsplit.accepted": usage.accepted,
        "specsplit.accepted_by_position": usage.accepted_by_position,
        "specsplit.cached_tokens": usage.cached_tokens,
        "specsplit.replicas": record.replicas,
        "specsplit.opens": record.num_opens,
        "specsplit.preempted": record.num_preempted,
        **{key: value for key, value in optional.items() if value is not None},
    }


def _operation(request: AdmittedRequest) -> str:
    return "chat" if request.is_chat else "text_completion"


def _message(role: str, text: str, **fields: str) -> str:
    """A list of messages in JSON, by the semantic conventions."""
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}], **fields}])


def _links(traceparent: str) -> tuple[TraceContext, ...]:
    context = parse_traceparent(traceparent)
    return () if context is None else (context,)


def _word(reason: NoDraftReason) -> str:
    return reason.name.lower()


def _microseconds(start_ns: int | None, end_ns: int | None) -> int | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) // 1000


def _signed(seed: int) -> int:
    """Attributes hold signed 64 bits."""
    return seed - 2**64 if seed >= 2**63 else seed
