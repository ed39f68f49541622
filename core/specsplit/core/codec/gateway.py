"""Conversion of the public gRPC API's messages. Knows nothing of what they do."""

from __future__ import annotations

from typing import TypeVar, assert_never

from specsplit.core.codec import common
from specsplit.core.errors import InvalidRequest
from specsplit.core.types import (
    ChatMessage,
    Delta,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    ModelCard,
    NoDraftReason,
    Speculation,
    Started,
    Usage,
)
from specsplit.v1 import common_pb2, gateway_pb2

T = TypeVar("T")


def generate_request_from_pb(pb: gateway_pb2.GenerateRequest) -> GenerateRequest:
    """Raises InvalidRequest naming the field when no prompt is given or a mode is unknown."""

    def optional(name: str, value: T) -> T | None:
        return value if pb.HasField(name) else None  # type: ignore[arg-type]

    return GenerateRequest(
        model=pb.model,
        prompt=_prompt_from_pb(pb),
        temperature=optional("temperature", pb.temperature),
        top_k=optional("top_k", pb.top_k),
        top_p=optional("top_p", pb.top_p),
        min_p=optional("min_p", pb.min_p),
        seed=optional("seed", pb.seed),
        max_tokens=optional("max_tokens", pb.max_tokens),
        min_tokens=optional("min_tokens", pb.min_tokens),
        stop=tuple(pb.stop),
        stop_token_ids=tuple(pb.stop_token_ids),
        ignore_eos=pb.ignore_eos,
        num_logprobs=optional("num_logprobs", pb.num_logprobs),
        report_margins=pb.report_margins,
        cache_salt=pb.cache_salt,
        priority=pb.priority,
        speculation=Speculation(
            k=pb.speculation.k if pb.speculation.HasField("k") else None, drafter=pb.speculation.drafter
        ),
        verification=common.verification_mode(pb.verification),
    )


def _prompt_from_pb(
    pb: gateway_pb2.GenerateRequest,
) -> str | tuple[int, ...] | tuple[ChatMessage, ...]:
    match pb.WhichOneof("prompt"):
        case "text":
            return pb.text
        case "tokens":
            return tuple(pb.tokens.ids)
        case "chat":
            return tuple(ChatMessage(m.role, m.content) for m in pb.chat.messages)
        case _:
            raise InvalidRequest("one of text, tokens or chat must be given", field="prompt")


def generate_request_to_pb(r: GenerateRequest) -> gateway_pb2.GenerateRequest:
    pb = gateway_pb2.GenerateRequest(
        model=r.model,
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        seed=r.seed,
        max_tokens=r.max_tokens,
        min_tokens=r.min_tokens,
        stop=r.stop,
        stop_token_ids=r.stop_token_ids,
        ignore_eos=r.ignore_eos,
        num_logprobs=r.num_logprobs,
        report_margins=r.report_margins,
        cache_salt=r.cache_salt,
        priority=r.priority,
        speculation=gateway_pb2.Speculation(k=r.speculation.k, drafter=r.speculation.drafter),
        verification=common_pb2.VerificationMode.ValueType(r.verification),
    )
    if isinstance(r.prompt, str):
        pb.text = r.prompt
    elif r.prompt and isinstance(r.prompt[0], ChatMessage):
        for message in r.prompt:
            assert isinstance(message, ChatMessage)
            pb.chat.messages.add(role=message.role, content=message.content)
    else:
        pb.tokens.SetInParent()
        for id_ in r.prompt:
            assert isinstance(id_, int)
            pb.tokens.ids.append(id_)
    return pb


def event_to_pb(event: GenerateEvent) -> gateway_pb2.GenerateEvent:
    match event:
        case Started():
            return gateway_pb2.GenerateEvent(
                started=gateway_pb2.Started(
                    request_id=event.request_id, prompt_ids=event.prompt_ids, seed=event.seed
                )
            )
        case Delta():
            return gateway_pb2.GenerateEvent(
                delta=gateway_pb2.Delta(
                    text=event.text,
                    ids=event.ids,
                    logprobs=common.logprobs_to_pb(event.logprobs),
                    margins=event.margins,
                )
            )
        case Finished():
            return gateway_pb2.GenerateEvent(
                finished=gateway_pb2.Finished(
                    finish_reason=common_pb2.FinishReason.ValueType(event.finish_reason),
                    usage=gateway_pb2.Usage(
                        prompt_tokens=event.usage.prompt_tokens,
                        completion_tokens=event.usage.completion_tokens,
                        cached_tokens=event.usage.cached_tokens,
                        steps=event.usage.steps,
                        drafted=event.usage.drafted,
                        accepted=event.usage.accepted,
                        accepted_by_position=event.usage.accepted_by_position,
                        no_draft_reason=gateway_pb2.NoDraftReason.ValueType(event.usage.no_draft_reason or 0),
                    ),
                )
            )
        case _:
            assert_never(event)


def event_from_pb(pb: gateway_pb2.GenerateEvent) -> GenerateEvent:
    match pb.WhichOneof("event"):
        case "started":
            return Started(pb.started.request_id, tuple(pb.started.prompt_ids), pb.started.seed)
        case "delta":
            return Delta(
                text=pb.delta.text,
                ids=tuple(pb.delta.ids),
                logprobs=common.logprobs_from_pb(pb.delta.logprobs),
                margins=tuple(pb.delta.margins),
            )
        case "finished":
            usage = pb.finished.usage
            return Finished(
                finish_reason=common.enum_member(
                    FinishReason, pb.finished.finish_reason, field="finish_reason"
                ),
                usage=Usage(
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    cached_tokens=usage.cached_tokens,
                    steps=usage.steps,
                    drafted=usage.drafted,
                    accepted=usage.accepted,
                    accepted_by_position=tuple(usage.accepted_by_position),
                    no_draft_reason=common.enum_member(
                        NoDraftReason, usage.no_draft_reason, field="no_draft_reason"
                    )
                    if usage.no_draft_reason
                    else None,
                ),
            )
        case _:
            raise InvalidRequest("the event is empty or of a kind unknown here", field="event")


def models_to_pb(cards: list[ModelCard]) -> gateway_pb2.ModelsReply:
    return gateway_pb2.ModelsReply(
        models=[gateway_pb2.Model(id=c.id, max_sequence_tokens=c.max_sequence_tokens) for c in cards]
    )
