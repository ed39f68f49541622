"""Errors in OpenAI's shape. Knows which status and type each error has, not what raised it."""

from __future__ import annotations

import logging
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specsplit.core.errors import SpecsplitError, shortened
from specsplit.gateway.api.openai_fields import Json

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
_RETRYABLE = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def error_json(error: Exception) -> Json:
    """What a client may know; an error that is not ours says nothing of its inside."""
    if isinstance(error, SpecsplitError):
        return _error(error.http_status, error.message, code=error.code, param=error.field)
    return _error(500, "internal error", code=SpecsplitError.code)


async def on_specsplit_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, SpecsplitError)
    if error.http_status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("a request failed", exc_info=error)
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if error.http_status in _RETRYABLE else None
    return JSONResponse(error_json(error), error.http_status, headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path}: {status.phrase.lower()}"
    return JSONResponse(_error(status, message, code=status.name.lower()), status, error.headers)


async def on_unexpected_error(_: Request, error: Exception) -> Response:
    """The server logs the traceback."""
    return JSONResponse(error_json(error), 500)


def _error(status: int, message: str, *, code: str, param: str | None = None) -> Json:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    param = None if param is None else shortened(param)
    return {"error": {"message": shortened(message), "type": kind, "param": param, "code": code}}
