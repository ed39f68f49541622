"""Turns what a client asks for into a request that nothing can refuse later. Knows no transport.

Every check happens here, before any work, and each refusal names the field.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import cast

from specsplit.core.codec.common import check_sampling
from specsplit.core.errors import InvalidRequest, ModelNotFound, PromptTooLong, UnsupportedParameter
from specsplit.core.trace_context import start_span
from specsplit.core.types import (
    MAX_DRAFT,
    ChatMessage,
    GenerateRequest,
    ModelCard,
    Order,
    SamplingParams,
    Speculation,
    TokenIds,
    VerificationMode,
    new_request_id,
)
from specsplit.gateway.request import AdmittedRequest, Limits
from specsplit.gateway.text.tokenizer import Tokenizer

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CACHE_SALT_BYTES = 256
DRAFTERS = ("ngram",)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED_ROLES = ("tool", "function")


def admit(
    request: GenerateRequest,
    *,
    tokenizer: Tokenizer,
    limits: Limits,
    model: ModelCard,
    default_k: int,
    arrival_us: int,
    default_max_tokens: int | None = None,
    traceparent: str = "",
    trace_ratio: float,
) -> AdmittedRequest:
    """Checks and tokenises. `arrival_us` is now; no `default_max_tokens` means what the context leaves.

    `traceparent` is the caller's header as it came; a broken one costs only the connection to its trace.

    A `max_tokens` beyond the context is accepted: such a request ends with `length` where the context ends.
    """
    if request.model not in ("", model.id):
        raise ModelNotFound(f"the model {request.model!r} does not exist", field="model")
    _check_stop(request.stop)
    cache_salt = request.cache_salt.encode()
    if len(cache_salt) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequest(f"cache_salt must be at most {MAX_CACHE_SALT_BYTES} bytes", field="cache_salt")
    if not -(2**31) <= request.priority < 2**31:
        raise InvalidRequest(
            f"priority must be a signed 32-bit integer, not {request.priority}", field="priority"
        )
    check_ids(request.stop_token_ids, limits, field="stop_token_ids")
    k = _speculative_length(request.speculation, default_k)
    if request.verification is not VerificationMode.COUPLED:
        raise UnsupportedParameter(
            "verification 'rejection' is not supported yet", field="speculation.verification"
        )
    sampling = _sampling(request, default_max_tokens or limits.max_sequence_tokens)
    prompt_ids, prompt_field = _prompt_ids(request, tokenizer, limits)
    max_room = limits.max_sequence_tokens - len(prompt_ids)
    if max_room < 1:
        raise PromptTooLong(
            f"the prompt has {len(prompt_ids)} tokens; with one token of output at least, the context of "
            f"{limits.max_sequence_tokens} tokens takes {limits.max_sequence_tokens - 1}",
            field=prompt_field,
        )
    request_id = new_request_id()
    return AdmittedRequest(
        request_id=request_id,
        order=Order(request.priority, arrival_us, request_id),
        prompt_ids=prompt_ids,
        sampling=check_sampling(replace(sampling, max_tokens=min(sampling.max_tokens, max_room))),
        stop=request.stop,
        k=k,
        cache_salt=cache_salt,
        trace=start_span(traceparent, ratio=trace_ratio),
        model=model.id,
        is_chat=prompt_field == "messages",
    )


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOPS:
        raise InvalidRequest(f"stop must hold at most {MAX_STOPS} strings, not {len(stop)}", field="stop")
    for string in stop:
        if not string:
            raise InvalidRequest("stop must not hold an empty string", field="stop")
        if len(string) > MAX_STOP_CHARS:
            raise InvalidRequest(f"a stop string must be at most {MAX_STOP_CHARS} characters", field="stop")


def check_ids(ids: TokenIds, limits: Limits, *, field: str) -> None:
    for index, id_ in enumerate(ids):
        if not 0 <= id_ < limits.vocab_size:
            raise InvalidRequest(
                f"{field}: the token id {id_} at {index} is outside the vocabulary of {limits.vocab_size}",
                field=field,
            )


def _speculative_length(speculation: Speculation, default_k: int) -> int:
    if speculation.drafter not in ("", *DRAFTERS):
        raise InvalidRequest(
            f"there is no drafter {speculation.drafter!r}; known: {', '.join(DRAFTERS)}",
            field="speculation.drafter",
        )
    k = default_k if speculation.k is None else speculation.k
    if not 0 <= k <= MAX_DRAFT:
        raise InvalidRequest(
            f"speculation.k must be between 0 and {MAX_DRAFT}, not {k}", field="speculation.k"
        )
    return k


def _sampling(request: GenerateRequest, default_max_tokens: int) -> SamplingParams:
    return check_sampling(
        SamplingParams(
            max_tokens=default_max_tokens if request.max_tokens is None else request.max_tokens,
            seed=_seed(request.seed),
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=request.top_k or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            min_tokens=request.min_tokens or 0,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            verification=request.verification,
            num_logprobs=request.num_logprobs,
            report_margins=request.report_margins,
        )
    )


def _seed(seed: int | None) -> int:
    """OpenAI's seeds are signed: a negative one is the unsigned number with the same 64 bits."""
    if seed is None:
        return secrets.randbits(64)
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequest(f"seed must be a 64-bit integer, not {seed}", field="seed")
    return seed % 2**64


def _prompt_ids(request: GenerateRequest, tokenizer: Tokenizer, limits: Limits) -> tuple[TokenIds, str]:
    """The prompt as token ids, and the name of the field it came in."""
    prompt = request.prompt
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("prompt must not be empty", field="prompt")
        ids, field = tokenizer.encode(prompt, add_special_tokens=True), "prompt"
    elif prompt and isinstance(prompt[0], ChatMessage):
        ids, field = tokenizer.encode_chat(check_messages(prompt)), "messages"
    else:
        ids, field = cast("tuple[int, ...]", prompt), "prompt"
    if not ids:
        raise InvalidRequest(f"{field} must not be empty", field=field)
    check_ids(ids, limits, field=field)
    return ids, field


def check_messages(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """The messages with the roles that chat templates know."""
    for index, message in enumerate(messages):
        if message.role not in _ROLES:
            error = UnsupportedParameter if message.role in _UNSUPPORTED_ROLES else InvalidRequest
            raise error(
                f"the role {message.role!r} is not supported; known: {', '.join(_ROLES)}",
                field=f"messages.{index}.role",
            )
    return tuple(ChatMessage(_ROLES[message.role], message.content) for message in messages)
