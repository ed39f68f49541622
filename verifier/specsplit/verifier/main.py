"""The verifier's process: settings, logging, life. Knows nothing of what the service does."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from functools import partial

from specsplit.core.errors import SettingsError, SpecsplitError
from specsplit.core.metrics import new_registry
from specsplit.core.metrics_http import serve_metrics
from specsplit.core.serving import GrpcService
from specsplit.core.settings import exit_on_settings_error, load_settings
from specsplit.core.tracing import num_dropped, open_sink
from specsplit.core.types import VerifierDescription
from specsplit.v1 import verifier_pb2_grpc
from specsplit.verifier.settings import VerifierSettings

PROG = "specsplit verifier"


def main(argv: Sequence[str]) -> None:
    try:
        settings = load_settings(VerifierSettings, argv, prog=PROG)
    except SettingsError as error:
        exit_on_settings_error(error, prog=PROG)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        asyncio.run(_serve(settings))
    except SpecsplitError as error:  # the model does not load or does not fit
        print(f"{PROG}: error: {error.message}", file=sys.stderr)
        raise SystemExit(1) from error


async def _serve(settings: VerifierSettings) -> None:
    # Slow to import: settings that are wrong are told without it. Loading first: it goes before torch.
    from specsplit.verifier.loading import load
    from specsplit.verifier.publisher import Publisher
    from specsplit.verifier.service import VerifierService

    server = GrpcService("specsplit.v1.Verifier", settings)

    def new_publisher(description: VerifierDescription) -> Publisher:
        assert settings.redis_url is not None
        return Publisher(
            settings.redis_url,
            namespace=description.registry_namespace,
            address=settings.advertise or server.addresses["grpc"],
            incarnation=description.incarnation,
            ttl_seconds=settings.registry_ttl_seconds,
        )

    spans = open_sink("verifier", settings.trace_file)
    registry = new_registry("verifier", restarts=settings.restarts, dropped_spans=partial(num_dropped, spans))
    service = VerifierService(
        lambda: load(settings),
        max_steps_in_flight=settings.max_steps_in_flight,
        on_failure=lambda: signal.raise_signal(signal.SIGTERM),
        new_publisher=new_publisher if settings.redis_url is not None else None,
        metrics=registry,
        spans=spans,
    )
    verifier_pb2_grpc.add_VerifierServicer_to_server(service, server.server)
    with serve_metrics(registry, host=settings.host, port=settings.metrics_port) as address:
        server.addresses["metrics"] = address
        await server.run(start=service.start, drain=service.drain, close=service.close)
    if spans is not None:
        spans.close()
    if service.failure is not None:
        raise SystemExit(1)
