"""`specsplit generate`: one prompt to a gateway over gRPC, its text to the terminal. Knows no model."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from specsplit.core.codec.gateway import event_from_pb, generate_request_to_pb
from specsplit.core.serving import open_channel
from specsplit.core.types import (
    ChatMessage,
    Delta,
    Finished,
    GenerateEvent,
    GenerateRequest,
    Speculation,
    Usage,
)
from specsplit.v1 import gateway_pb2_grpc

EXIT_INTERRUPTED = 130
DEFAULT_ADDRESS = "127.0.0.1:50051"
_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64 - 1


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        return asyncio.run(_generate(options.address, _request(options)))
    except KeyboardInterrupt:
        print(flush=True)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specsplit generate",
        description="Streams one reply to the terminal and ends with a line of what it took; tokens/s counts "
        "output tokens over the whole time, prompt included.",
    )
    count, seed = _whole_number(_MAX_UINT32), _whole_number(_MAX_UINT64)
    parser.add_argument("prompt", help="what the user says")
    parser.add_argument(
        "--address", default=DEFAULT_ADDRESS, help="gRPC address of the gateway (%(default)s)"
    )
    parser.add_argument("--max-tokens", type=count, metavar="N", help="most output tokens")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy; the server's default is 1"
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="keep the most probable tokens up to this mass"
    )
    parser.add_argument("--top-k", type=count, metavar="N", help="keep this many tokens; 0 is all")
    parser.add_argument("--min-p", type=float, metavar="P", help="keep tokens above this share of the best")
    parser.add_argument("--seed", type=seed, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--k", type=count, metavar="N", help="draft tokens per step; 0 is no speculation")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the text itself, without a chat template"
    )
    return parser


def _whole_number(maximum: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if not 0 <= value <= maximum:
            raise argparse.ArgumentTypeError(f"must be between 0 and {maximum}, not {value}")
        return value

    return whole_number


def _request(options: argparse.Namespace) -> GenerateRequest:
    return GenerateRequest(
        prompt=options.prompt if options.raw else (ChatMessage("user", options.prompt),),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        max_tokens=options.max_tokens,
        stop=tuple(options.stop),
        speculation=Speculation(k=options.k),
    )


async def _generate(address: str, request: GenerateRequest) -> int:
    began = time.monotonic()
    usage: Usage | None = None
    try:
        async for event in _events(address, request):
            match event:
                case Delta():
                    print(event.text, end="", flush=True)
                case Finished():
                    usage = event.usage
    except grpc.aio.AioRpcError as error:
        print(f"specsplit generate: error: {_explain(error, address)}", file=sys.stderr)
        return 1
    assert usage is not None, "the stream ended without its last event"
    print(f"\n\n{_summary(usage, time.monotonic() - began)}", flush=True)
    return 0


async def _events(address: str, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
    async with open_channel(address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(generate_request_to_pb(request))
        try:
            async for pb in call:
                yield event_from_pb(pb)
        finally:
            call.cancel()


def _summary(usage: Usage, seconds: float) -> str:
    return (
        f"{usage.completion_tokens} tokens, {usage.completion_tokens / seconds:.1f} tokens/s, "
        f"{usage.steps} steps, {usage.drafted} drafted, {usage.accepted} accepted, "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
    )


def _explain(error: grpc.aio.AioRpcError, address: str) -> str:
    """A gateway's own refusals carry a code; without one the call did not reach a gateway or broke off."""
    codes = {key for key, _ in error.trailing_metadata() or ()}
    if error.code() is grpc.StatusCode.UNAVAILABLE and "specsplit-code" not in codes:
        return f"no gateway answers at {address}; `specsplit serve` starts one ({error.details()})"
    return f"{error.details()} ({error.code().name})"
