"""OpenAI's HTTP API over a Generator: routes and what each asks of the other files. Knows no scheduling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from specsplit.core.errors import InvalidRequest, ModelNotFound, SpecsplitError, Unavailable
from specsplit.core.types import ModelCard
from specsplit.gateway.api import http_errors
from specsplit.gateway.api.admission import admit, check_ids, check_messages
from specsplit.gateway.api.http_body import parse_object, read_body
from specsplit.gateway.api.openai_fields import Json
from specsplit.gateway.api.openai_render import ChatShape, CompletionShape, token_text
from specsplit.gateway.api.openai_response import GenerationResponse
from specsplit.gateway.api.openai_schema import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from specsplit.gateway.request import AdmittedRequest, Generator
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.text.tokenizer import Tokenizer

BodyT = TypeVar("BodyT", ChatBody, CompletionBody)


def create_app(
    generator: Generator,
    tokenizer: Tokenizer,
    settings: GatewaySettings,
    *,
    metrics: CollectorRegistry | None = None,
) -> Starlette:
    """`metrics` are served at /metrics where they are given."""
    api = _OpenAIHttp(generator, tokenizer, settings)
    routes = [] if metrics is None else [Route("/metrics", partial(_metrics, metrics), methods=["GET"])]
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/models", api.models, methods=["GET"]),
            Route("/v1/models/{id:path}", api.model, methods=["GET"]),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/detokenize", api.detokenize, methods=["POST"]),
            Route("/health", api.health, methods=["GET"]),
            Route("/ready", api.ready, methods=["GET"]),
            *routes,
        ],
        exception_handlers={
            SpecsplitError: http_errors.on_specsplit_error,
            HTTPException: http_errors.on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: http_errors.on_unexpected_error,
        },
    )
    app.router.redirect_slashes = False
    return app


class _OpenAIHttp:
    def __init__(self, generator: Generator, tokenizer: Tokenizer, settings: GatewaySettings) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._settings = settings
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        body, admitted = await self._admit(request, parse_chat, None)
        shape = ChatShape(
            self._tokenizer, has_logprobs=bool(body.logprobs), has_token_ids=bool(body.return_token_ids)
        )
        return GenerationResponse(
            self._generator,
            admitted,
            shape,
            is_streamed=bool(body.stream),
            is_usage_streamed=body.is_usage_streamed,
        )

    async def completions(self, request: Request) -> Response:
        body, admitted = await self._admit(request, parse_completion, DEFAULT_COMPLETION_TOKENS)
        shape = CompletionShape(
            self._tokenizer,
            has_logprobs=body.logprobs is not None,
            has_token_ids=bool(body.return_token_ids),
        )
        return GenerationResponse(
            self._generator,
            admitted,
            shape,
            is_streamed=bool(body.stream),
            is_usage_streamed=body.is_usage_streamed,
        )

    async def _admit(
        self, request: Request, parse_body: Callable[[Json], BodyT], default_max_tokens: int | None
    ) -> tuple[BodyT, list[AdmittedRequest]]:
        """Reads, checks and tokenises; the work on a large body is done beside the event loop."""
        raw = await read_body(request, max_bytes=self._settings.max_body_bytes)
        model, limits = self._generator.model(), self._generator.limits()
        arrival_us = time.time_ns() // 1000
        traceparent = request.headers.get("traceparent", "")

        def check() -> tuple[BodyT, list[AdmittedRequest]]:
            body = parse_body(parse_object(raw))
            requests = body.to_requests()
            if len(requests) > self._settings.max_requests:
                raise InvalidRequest(
                    f"{len(requests)} prompts are more than this server takes at once, "
                    f"{self._settings.max_requests}",
                    field="prompt",
                )
            admitted = [
                admit(
                    one,
                    tokenizer=self._tokenizer,
                    limits=limits,
                    model=model,
                    default_k=self._settings.speculation_k,
                    arrival_us=arrival_us,
                    default_max_tokens=default_max_tokens,
                    traceparent=traceparent,
                    trace_ratio=self._settings.trace_ratio,
                )
                for one in requests
            ]
            return body, admitted

        return await asyncio.to_thread(check)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_json(self._generator.model())]})

    async def model(self, request: Request) -> Response:
        model = self._generator.model()
        self._check_model(request.path_params["id"], model)
        return JSONResponse(self._model_json(model))

    async def tokenize(self, request: Request) -> Response:
        raw = await read_body(request, max_bytes=self._settings.max_body_bytes)
        model = self._generator.model()

        def check() -> tuple[TokenizeBody, tuple[int, ...]]:
            body = parse_tokenize(parse_object(raw))
            self._check_model(body.model or model.id, model)
            if (body.prompt is None) == (body.messages is None):
                raise InvalidRequest("one of prompt and messages must be given", field="prompt")
            if body.messages is not None:
                messages = check_messages(tuple(message.to_chat_message() for message in body.messages))
                return body, self._tokenizer.encode_chat(messages)
            assert body.prompt is not None
            add_special_tokens = body.add_special_tokens is not False
            return body, self._tokenizer.encode(body.prompt, add_special_tokens=add_special_tokens)

        body, ids = await asyncio.to_thread(check)
        token_bytes = map(self._tokenizer.token_bytes, ids)
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": model.max_sequence_tokens,
                "tokens": ids,
                "token_strs": [token_text(token) for token in token_bytes]
                if body.return_token_strs
                else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        raw = await read_body(request, max_bytes=self._settings.max_body_bytes)
        model, limits = self._generator.model(), self._generator.limits()

        def check() -> str:
            body = parse(DetokenizeBody, parse_object(raw))
            self._check_model(body.model or model.id, model)
            check_ids(body.tokens, limits, field="tokens")
            return self._tokenizer.decode(body.tokens)

        return JSONResponse({"prompt": await asyncio.to_thread(check)})

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        if not self._generator.is_ready:
            raise Unavailable("no verifier is connected")
        return JSONResponse({"status": "ok"})

    def _check_model(self, id_: str, model: ModelCard) -> None:
        if id_ != model.id:
            raise ModelNotFound(f"the model {id_!r} does not exist", field="model")

    def _model_json(self, model: ModelCard) -> Json:
        return {
            "id": model.id,
            "object": "model",
            "created": self._created,
            "owned_by": "specsplit",
            "max_model_len": model.max_sequence_tokens,
        }


async def _metrics(registry: CollectorRegistry, request: Request) -> Response:
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"content-type": content_type})


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """The client left while it sent its body; nobody reads this."""
    return Response(status_code=400)
