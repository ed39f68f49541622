"""OpenAI's request bodies: what is accepted, ignored and refused, and what it asks for. Knows no HTTP.

A field is one of four kinds: declared in a model below and used; declared there under "cannot change the
output" and ignored; in a table of `openai_fields`, where every value but the listed ones is refused as
unsupported; or unknown, and refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specsplit.core.errors import InvalidRequest, UnsupportedParameter
from specsplit.core.types import MAX_LOGPROBS, ChatMessage, GenerateRequest, VerificationMode
from specsplit.core.types import Speculation as SpeculationParams
from specsplit.gateway.api.openai_fields import (
    CHAT_ONLY,
    COMPLETION_ONLY,
    Json,
    without_no_ops,
    without_no_ops_in_messages,
)

ModelT = TypeVar("ModelT", bound=BaseModel)
ItemT = TypeVar("ItemT")
ListOf = Annotated[list[ItemT], Field(fail_fast=True)]  # one wrong item is enough
DEFAULT_COMPLETION_TOKENS = 16


class _Strict(BaseModel):
    """No "5" for a number, no true for 1, no NaN, nothing unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # cannot change the output


class Speculation(_Strict):
    k: int | Literal["auto"] | None = None
    drafter: str | None = None
    verification: Literal["coupled", "rejection"] | None = None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: str
    content: str | ListOf[TextPart]

    def to_chat_message(self) -> ChatMessage:
        """Text parts are joined by line breaks."""
        if isinstance(self.content, str):
            return ChatMessage(self.role, self.content)
        return ChatMessage(self.role, "\n".join(part.text for part in self.content))


class _Body(_Strict):
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | ListOf[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: ListOf[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    speculation: Speculation | None = None
    return_token_ids: bool | None = None
    # Cannot change the output.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    @property
    def is_usage_streamed(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _to_request(
        self, prompt: str | tuple[int, ...] | tuple[ChatMessage, ...], num_logprobs: int | None
    ) -> GenerateRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options goes only with stream: true", field="stream_options")
        speculation = self.speculation or Speculation()
        if speculation.k == "auto":
            raise UnsupportedParameter(
                "speculation.k 'auto' is not supported yet; give a number", field="speculation.k"
            )
        verification = VerificationMode[(speculation.verification or "coupled").upper()]
        return GenerateRequest(
            prompt=prompt,
            model=self.model or "",
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            num_logprobs=num_logprobs,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            speculation=SpeculationParams(speculation.k, speculation.drafter or ""),
            verification=verification,
        )


class CompletionBody(_Body):
    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def to_requests(self) -> list[GenerateRequest]:
        """One for each prompt."""
        return [self._to_request(prompt, self.logprobs) for prompt in _prompts(self.prompt)]


class ChatBody(_Body):
    messages: ListOf[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    # Cannot change the output.
    parallel_tool_calls: bool | None = None

    def to_requests(self) -> list[GenerateRequest]:
        """Exactly one."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs goes only with logprobs: true", field="top_logprobs")
        if self.max_tokens not in (None, self.max_completion_tokens or self.max_tokens):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same; they differ",
                field="max_completion_tokens",
            )
        messages = tuple(message.to_chat_message() for message in self.messages)
        request = self._to_request(messages, (self.top_logprobs or 0) if self.logprobs else None)
        return [replace(request, max_tokens=self.max_completion_tokens or self.max_tokens)]


class TokenizeBody(_Strict):
    """Text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Strict):
    model: str | None = None
    tokens: ListOf[int]


def parse_chat(body: Json) -> ChatBody:
    return parse(ChatBody, without_no_ops_in_messages(without_no_ops(body, CHAT_ONLY)))


def parse_completion(body: Json) -> CompletionBody:
    return parse(CompletionBody, without_no_ops(body, COMPLETION_ONLY))


def parse_tokenize(body: Json) -> TokenizeBody:
    return parse(TokenizeBody, without_no_ops_in_messages(body))


def parse(model: type[ModelT], body: Json) -> ModelT:
    """Raises InvalidRequest naming the field that is wrong deepest inside the body."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        found = [
            (_path(detail["loc"], body, is_missing=detail["type"] == "missing"), detail)
            for detail in error.errors(include_url=False)
        ]
        path, detail = max(found, key=lambda item: len(item[0]))
    field = ".".join(str(part) for part in path)
    if detail["type"] == "extra_forbidden":
        raise InvalidRequest(f"unknown field: {field}", field=field)
    if detail["type"] == "literal_error" and path[-1] == "type":
        raise UnsupportedParameter(f"{field}: {detail['input']!r} content is not supported", field=field)
    raise InvalidRequest(f"{field}: {detail['msg']}", field=field)


def _path(location: tuple[int | str, ...], body: Any, *, is_missing: bool) -> tuple[int | str, ...]:
    """The location without the names that pydantic adds for the alternatives of a union."""
    path: list[int | str] = []
    for index, part in enumerate(location):
        if isinstance(part, int) or (isinstance(body, dict) and part in body):
            path.append(part)
            body = body[part]
        elif is_missing and index == len(location) - 1:
            path.append(part)
    return tuple(path)


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    """A text, token ids, or a list of either; the kind of the first element decides for all."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if type(value[0]) is int:
            return [_ids(value, "prompt")]
        if isinstance(value[0], str):
            for index, text in enumerate(value):
                if not isinstance(text, str):
                    raise InvalidRequest(f"prompt.{index} must be a string", field=f"prompt.{index}")
            return list(value)
        if isinstance(value[0], list):
            return [_ids(ids, f"prompt.{index}") for index, ids in enumerate(value)]
    raise InvalidRequest(
        "prompt must be a string, token ids, or a list of strings or of token ids, and not empty",
        field="prompt",
    )


def _ids(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{field} must be a list of token ids", field=field)
    for index, id_ in enumerate(value):
        if type(id_) is not int:
            raise InvalidRequest(f"{field}.{index} must be a token id", field=f"{field}.{index}")
    return tuple(value)
