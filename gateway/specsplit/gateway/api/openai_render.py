"""Events of a generation in OpenAI's shapes, whole and streamed. Knows no HTTP and no engine."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import zip_longest
from typing import Protocol

from specsplit.core.types import Delta, FinishReason, Started, TokenIds, TokenLogprobs, Usage
from specsplit.gateway.api.openai_fields import Json
from specsplit.gateway.text.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # JSON has no -inf


class Shape(Protocol):
    """How one of OpenAI's APIs writes its choices. One instance serves one response."""

    id_prefix: str
    object: str
    chunk_object: str

    def head(self, started: Started) -> Json:
        """Fields beside `choices` of the whole response and of its first chunk."""
        ...

    def started(self, index: int, started: Started) -> Json | None:
        """The choice of the first chunk, None when there is nothing to say yet."""
        ...

    def delta(self, index: int, delta: Delta) -> Json | None:
        """The choice of a chunk, None when there is nothing to say yet."""
        ...

    def finished(self, index: int, reason: FinishReason) -> Json:
        """The choice of the last chunk."""
        ...

    def whole(self, index: int, started: Started, output: Delta, reason: FinishReason) -> Json:
        """The choice of a whole response; `output` is all its deltas in one."""
        ...


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, has_logprobs: bool, has_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids

    def head(self, started: Started) -> Json:
        return {"prompt_token_ids": list(started.prompt_ids)} if self._has_token_ids else {}

    def started(self, index: int, started: Started) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, delta: Delta) -> Json | None:
        if not delta.text and not (delta.ids and (self._has_logprobs or self._has_token_ids)):
            return None
        choice = self._chunk(index, {"content": delta.text})
        return choice | {"logprobs": self._logprobs(delta)} | self._token_ids(delta.ids)

    def finished(self, index: int, reason: FinishReason) -> Json:
        return self._chunk(index, {}) | {"finish_reason": reason.openai}

    def whole(self, index: int, started: Started, output: Delta, reason: FinishReason) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": reason.openai,
        } | self._token_ids(output.ids)

    def _chunk(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _token_ids(self, ids: TokenIds) -> Json:
        return {"token_ids": list(ids)} if self._has_token_ids else {}

    def _logprobs(self, delta: Delta) -> Json | None:
        if not self._has_logprobs:
            return None
        content = [
            self._token(id_, scores.logprob)
            | {
                "top_logprobs": [
                    self._token(top_id, logprob)
                    for top_id, logprob in zip(scores.top_ids, scores.top_logprobs, strict=True)
                ]
            }
            for id_, scores in zip(delta.ids, delta.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, id_: int, logprob: float) -> Json:
        token = self._tokenizer.token_bytes(id_)
        return {"token": token_text(token), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(token)}


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, has_logprobs: bool, has_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids
        self._offsets: dict[int, _TextOffset] = {}  # by choice

    def head(self, started: Started) -> Json:
        return {}

    def started(self, index: int, started: Started) -> Json | None:
        if not self._has_token_ids:
            return None
        return self._choice(index, Delta("", ())) | self._prompt_ids(started)

    def delta(self, index: int, delta: Delta) -> Json | None:
        if not delta.text and not (delta.ids and (self._has_logprobs or self._has_token_ids)):
            return None
        return self._choice(index, delta)

    def finished(self, index: int, reason: FinishReason) -> Json:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason.openai}

    def whole(self, index: int, started: Started, output: Delta, reason: FinishReason) -> Json:
        return self._choice(index, output) | {"finish_reason": reason.openai} | self._prompt_ids(started)

    def _choice(self, index: int, delta: Delta) -> Json:
        choice: Json = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, delta),
            "finish_reason": None,
        }
        if self._has_token_ids:
            choice["token_ids"] = list(delta.ids)
        return choice

    def _prompt_ids(self, started: Started) -> Json:
        return {"prompt_token_ids": list(started.prompt_ids)} if self._has_token_ids else {}

    def _logprobs(self, index: int, delta: Delta) -> Json | None:
        if not self._has_logprobs:
            return None
        offset = self._offsets.setdefault(index, _TextOffset(self._tokenizer))
        return {
            "tokens": [self._text(id_) for id_ in delta.ids],
            "token_logprobs": [max(scores.logprob, _MIN_LOGPROB) for scores in delta.logprobs],
            "top_logprobs": [
                self._top(id_, scores) for id_, scores in zip(delta.ids, delta.logprobs, strict=True)
            ],
            "text_offset": [offset.before(id_) for id_ in delta.ids],
        }

    def _text(self, id_: int) -> str:
        return token_text(self._tokenizer.token_bytes(id_))

    def _top(self, id_: int, scores: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, and the chosen one in any case."""
        pairs = [*zip(scores.top_ids, scores.top_logprobs, strict=True), (id_, scores.logprob)]
        return {self._text(top_id): max(logprob, _MIN_LOGPROB) for top_id, logprob in pairs}


class _TextOffset:
    """Where each token begins in the output's text, in characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def before(self, id_: int) -> int:
        offset = self._num_chars
        if self._tokenizer.is_text(id_):
            self._num_chars += len(self._decoder.decode(self._tokenizer.token_bytes(id_)))
        return offset


def token_text(token: bytes) -> str:
    """What is no text of its own, such as half a character, is written as OpenAI does: `bytes:\\xe2`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def merge_deltas(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        text="".join(delta.text for delta in deltas),
        ids=tuple(id_ for delta in deltas for id_ in delta.ids),
        logprobs=tuple(scores for delta in deltas for scores in delta.logprobs),
    )


def _no_draft_reason(usages: Sequence[Usage]) -> str | None:
    """Why nothing was drafted in any of the generations; the first one's reason stands for all."""
    if any(usage.drafted for usage in usages):
        return None
    return next((u.no_draft_reason.name.lower() for u in usages if u.no_draft_reason is not None), None)


def usage_json(usages: Sequence[Usage]) -> Json:
    """The sum. Accepted and rejected prediction tokens are of OpenAI's `prediction`, not of drafts."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    by_position = zip_longest(*(usage.accepted_by_position for usage in usages), fillvalue=0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        "speculation": {
            "steps": sum(usage.steps for usage in usages),
            "drafted": sum(usage.drafted for usage in usages),
            "accepted": sum(usage.accepted for usage in usages),
            "accepted_by_position": [sum(position) for position in by_position],
            "no_draft_reason": _no_draft_reason(usages),
        },
    }
