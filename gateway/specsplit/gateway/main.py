"""The gateway process: puts the step loop, the HTTP API and the gRPC API together."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial

from specsplit.core.errors import SettingsError, SpecsplitError, Unavailable
from specsplit.core.metrics import new_registry
from specsplit.core.serving import GrpcService, join_address
from specsplit.core.settings import exit_on_settings_error, load_settings
from specsplit.core.tracing import num_dropped, open_sink
from specsplit.gateway.api.grpc_api import GatewayServicer
from specsplit.gateway.api.http_server import HttpServer
from specsplit.gateway.api.openai_http import create_app
from specsplit.gateway.dispatcher import Dispatcher
from specsplit.gateway.metrics import Metrics, show_counters
from specsplit.gateway.records import Observer, Reporter
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.text.tokenizer import Tokenizer
from specsplit.gateway.tracing import Tracing
from specsplit.v1 import gateway_pb2_grpc

PROG = "specsplit gateway"


def main(argv: Sequence[str]) -> None:
    try:
        settings = load_settings(GatewaySettings, argv, prog=PROG)
    except SettingsError as error:
        exit_on_settings_error(error, prog=PROG)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(settings))
    except SpecsplitError as error:  # a port that is taken, a tokenizer that cannot be read
        print(f"{PROG}: error: {error.message}", file=sys.stderr)
        raise SystemExit(1) from error


async def serve(settings: GatewaySettings) -> None:
    """Serves until a signal; ends the process loudly when the step loop fails."""
    tokenizer = Tokenizer.load(settings.tokenizer)
    sink = open_sink("gateway", settings.trace_file)
    registry = new_registry("gateway", restarts=settings.restarts, dropped_spans=partial(num_dropped, sink))
    observers: list[Observer] = [Metrics(registry)]
    if sink is not None:
        observers.append(Tracing(sink, decode=tokenizer.decode if settings.trace_content else None))
    reporter = Reporter(observers)
    dispatcher = Dispatcher(settings, tokenizer, reporter)
    show_counters(registry, dispatcher.counters, settings.verifiers)
    service = GrpcService("specsplit.v1.Gateway", settings)
    servicer = GatewayServicer(dispatcher, tokenizer, settings)
    gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, service.server)
    app = create_app(dispatcher, tokenizer, settings, metrics=registry)
    http = HttpServer(app, host=settings.host, port=settings.http_port)
    running = asyncio.ensure_future(dispatcher.run())
    running.add_done_callback(_exit_on_failure)

    async def start() -> None:
        try:
            await http.start()
        except OSError as error:
            wanted = join_address(settings.host, settings.http_port)
            raise Unavailable(f"cannot listen on {wanted}: {error.strerror}", field="http_port") from error
        service.addresses["http"] = join_address(settings.host, http.port)

    async def close() -> None:
        await http.stop()
        dispatcher.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        reporter.flush()
        if sink is not None:
            await asyncio.to_thread(sink.close)

    await service.run(start=start, drain=dispatcher.drain, close=close)


def _exit_on_failure(running: asyncio.Future[None]) -> None:
    """A step loop that broke an invariant serves nobody: the process says why and ends."""
    if not running.cancelled() and running.exception() is not None:
        logging.critical("the step loop failed", exc_info=running.exception())
        os._exit(70)
