"""Reads a JSON object from a request, bounded. Knows nothing of its fields."""

from __future__ import annotations

import pydantic_core
from starlette.requests import Request

from specsplit.core.errors import InvalidRequest, RequestTooLarge
from specsplit.gateway.api.openai_fields import Json


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Raises RequestTooLarge.

    A body that is a little too large is read to its end before it is refused: a server that answers and
    closes while its client still sends often loses the answer.
    """
    chunks, num_bytes = [], 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            chunks.append(chunk)
        elif num_bytes > 2 * max_bytes:
            break
    if num_bytes > max_bytes:
        raise RequestTooLarge(f"the body is larger than {max_bytes} bytes")
    return b"".join(chunks)


def parse_object(body: bytes) -> Json:
    """Raises InvalidRequest for what is not a JSON object, such as NaN, lone surrogates, deep nesting."""
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value
