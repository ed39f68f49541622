"""The drafter process: settings to a running service. Knows no way of proposing but which one to make."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from functools import partial

from specsplit.core.errors import SettingsError, SpecsplitError
from specsplit.core.metrics import new_registry
from specsplit.core.metrics_http import serve_metrics
from specsplit.core.serving import GrpcService
from specsplit.core.settings import exit_on_settings_error, load_settings
from specsplit.core.tracing import num_dropped, open_sink
from specsplit.drafter.ngram import NgramProposer
from specsplit.drafter.proposer import Proposer, State
from specsplit.drafter.service import SERVICE_NAME, DrafterService
from specsplit.drafter.settings import DrafterSettings
from specsplit.v1 import drafter_pb2_grpc

PROG = "specsplit drafter"


def main(argv: Sequence[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = load_settings(DrafterSettings, argv, prog=PROG)
    except SettingsError as error:
        exit_on_settings_error(error, prog=PROG)
    try:
        asyncio.run(serve(NgramProposer(min_n=settings.min_n, max_n=settings.max_n), settings))
    except SpecsplitError as error:  # a port that is taken
        print(f"{PROG}: error: {error.message}", file=sys.stderr)
        raise SystemExit(1) from error


async def serve(proposer: Proposer[State], settings: DrafterSettings) -> None:
    """Serves `proposer` until SIGTERM or SIGINT."""
    spans = open_sink("drafter", settings.trace_file)
    registry = new_registry("drafter", restarts=settings.restarts, dropped_spans=partial(num_dropped, spans))
    drafter = DrafterService(
        proposer,
        max_context_tokens=settings.max_context_tokens,
        idle_seconds=settings.idle_seconds,
        metrics=registry,
        spans=spans,
    )
    process = GrpcService(SERVICE_NAME, settings)
    drafter_pb2_grpc.add_DrafterServicer_to_server(drafter, process.server)
    with serve_metrics(registry, host=settings.host, port=settings.metrics_port) as address:
        process.addresses["metrics"] = address
        await process.run(start=drafter.start, drain=drafter.drain, close=drafter.close)
    if spans is not None:
        spans.close()
