"""What the suites of the gateway's APIs share: a small tokenizer, a scripted generator, a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specsplit.core.errors import SpecsplitError, Unavailable
from specsplit.core.types import (
    Delta,
    Finished,
    FinishReason,
    GenerateEvent,
    ModelCard,
    Started,
    TokenLogprobs,
    Usage,
)
from specsplit.gateway.api.http_server import HttpServer
from specsplit.gateway.api.openai_http import create_app
from specsplit.gateway.request import AdmittedRequest, Limits
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.text.output import OutputText
from specsplit.gateway.text.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token per byte, three special ones; 259 ids."""
    folder = tmp_path_factory.mktemp("byte-tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE})
    )
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(byte_tokenizer_dir)


@dataclass
class ScriptedGenerator:
    """Says `reply` in runs of `run_length` tokens, as the real one would; waits or fails where told."""

    tokenizer: Tokenizer
    reply: str = "Hello, wörld 👋!"
    run_length: int = 3
    is_ready: bool = True
    hold_before_start: bool = False  # until cancelled
    hold_after_tokens: int | None = None  # until cancelled
    fail_before_start: Exception | None = None
    fail_after_tokens: tuple[int, Exception] | None = None
    requests: list[AdmittedRequest] = field(default_factory=list)
    num_running: int = 0
    num_cancelled: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def model(self) -> ModelCard:
        if not self.is_ready:
            raise Unavailable("no verifier is connected yet")
        return ModelCard("org/tiny", 256)

    def limits(self) -> Limits:
        if not self.is_ready:
            raise Unavailable("no verifier is connected yet")
        return Limits(self.tokenizer.vocab_size, 256)

    def counters(self) -> Mapping[str, int]:
        return {"requests": self.num_running}

    async def wait_for(self, *, num_running: int, num_cancelled: int) -> None:
        async with self.changed:
            await self.changed.wait_for(
                lambda: (self.num_running, self.num_cancelled) == (num_running, num_cancelled)
            )

    async def generate(self, request: AdmittedRequest) -> AsyncGenerator[GenerateEvent, None]:
        self.requests.append(request)
        await self._count(num_running=1)
        is_cancelled = True
        try:
            if self.fail_before_start is not None:
                raise self.fail_before_start
            if self.hold_before_start:
                await asyncio.Event().wait()
            yield Started(request.request_id, request.prompt_ids, request.sampling.seed)
            for event in self._events(request):
                num_tokens = len(event.ids) if isinstance(event, Delta) else 0
                if self.hold_after_tokens is not None and num_tokens:
                    self.hold_after_tokens -= num_tokens
                    if self.hold_after_tokens < 0:
                        await asyncio.Event().wait()
                if self.fail_after_tokens is not None and num_tokens:
                    left, error = self.fail_after_tokens
                    if left <= 0:
                        raise error
                    self.fail_after_tokens = (left - num_tokens, error)
                yield event
            is_cancelled = False
        except (SpecsplitError, RuntimeError):
            is_cancelled = False
            raise
        finally:
            self.num_running -= 1
            self.num_cancelled += is_cancelled
            await asyncio.shield(asyncio.ensure_future(self._count(num_running=0)))

    async def _count(self, *, num_running: int) -> None:
        async with self.changed:
            self.num_running += num_running
            self.changed.notify_all()

    def _events(self, request: AdmittedRequest) -> list[GenerateEvent]:
        """Deltas cut at a stop string or at max_tokens, then Finished."""
        output, events, num_tokens = OutputText(self.tokenizer, request.stop), list[GenerateEvent](), 0
        ids = self.tokenizer.encode(self.reply, add_special_tokens=False)[: request.sampling.max_tokens]
        reason = FinishReason.LENGTH if len(ids) == request.sampling.max_tokens else FinishReason.STOP
        for start in range(0, len(ids), self.run_length):
            text, kept = "", list[int]()
            for id_ in ids[start : start + self.run_length]:
                kept.append(id_)
                text += output.push(id_)
                if output.is_stopped:
                    break
            num_tokens += len(kept)
            is_last = output.is_stopped or num_tokens == len(ids)
            text += output.finish() if is_last else ""
            events.append(Delta(text, tuple(kept), tuple(self._scores(request, id_) for id_ in kept)))
            if request.sampling.num_logprobs is None:
                events[-1] = Delta(text, tuple(kept))
            if output.is_stopped:
                reason = FinishReason.STOP
                break
        usage = Usage(len(request.prompt_ids), num_tokens, 16, len(events), 6, 4, (2, 1, 1))
        return [*events, Finished(reason, usage)]

    def _scores(self, request: AdmittedRequest, id_: int) -> TokenLogprobs:
        num_top = request.sampling.num_logprobs or 0
        top_ids = tuple((id_ + n) % self.tokenizer.vocab_size for n in range(num_top))
        return TokenLogprobs(-0.5, top_ids, tuple(-0.5 - n for n in range(num_top)))


@pytest.fixture
def generator(byte_tokenizer: Tokenizer) -> ScriptedGenerator:
    return ScriptedGenerator(byte_tokenizer)


@pytest.fixture
def gateway_settings(byte_tokenizer_dir: Path) -> GatewaySettings:
    return GatewaySettings(tokenizer=byte_tokenizer_dir, max_body_bytes=64 * 1024)


@pytest.fixture
async def http_server(
    generator: ScriptedGenerator, byte_tokenizer: Tokenizer, gateway_settings: GatewaySettings
) -> AsyncIterator[HttpServer]:
    app = create_app(generator, byte_tokenizer, gateway_settings)
    server = HttpServer(app, host="127.0.0.1", port=0)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def base_url(http_server: HttpServer) -> str:
    return f"http://127.0.0.1:{http_server.port}"
