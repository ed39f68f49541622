"""Typed errors: one class per way a call can be refused, with its HTTP and gRPC status."""

from __future__ import annotations

from typing import ClassVar

_MAX_SAID_CHARS = 600  # gRPC takes 8 KB of metadata, where a character is up to 12 bytes


def shortened(text: str) -> str:
    """What a caller is told of `text`, which may repeat what the caller sent."""
    return text if len(text) <= _MAX_SAID_CHARS else f"{text[: _MAX_SAID_CHARS - 1]}…"


class SpecsplitError(Exception):
    """Base of every error that a caller may see.

    `code` is a stable machine-readable word, `field` names the offending parameter where there is one,
    `http_status` and `grpc_status` (the name of a `grpc.StatusCode`) say how each transport reports it.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidRequest(SpecsplitError):
    """A parameter has a value that cannot be served, whatever the state of the system."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class UnsupportedParameter(InvalidRequest):
    """A parameter that this version does not implement; never dropped in silence."""

    code = "unsupported_parameter"


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for one output token."""

    code = "context_length_exceeded"


class ModelNotFound(SpecsplitError):
    """The request names a model that is not served here."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class RequestTooLarge(SpecsplitError):
    """The body is larger than the server reads."""

    code = "request_too_large"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class Overloaded(SpecsplitError):
    """A bounded queue is full; trying later may work."""

    code = "overloaded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class NumericError(SpecsplitError):
    """The target's logits for this request were not finite."""

    code = "numeric_error"
    http_status = 500
    grpc_status = "INTERNAL"


class Unavailable(SpecsplitError):
    """The service needed is not reachable or is shutting down."""

    code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class ProtocolError(SpecsplitError):
    """A message that the wire contract forbids: a bug or an incompatible peer, never a user's mistake."""

    code = "protocol_error"
    http_status = 500
    grpc_status = "FAILED_PRECONDITION"


class SettingsError(SpecsplitError):
    """A flag, environment variable or settings file has a wrong value."""

    code = "bad_settings"
    grpc_status = "FAILED_PRECONDITION"
