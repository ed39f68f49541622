"""The verifier's gRPC face: streams in, events out. Knows no sampling, no memory and no model.

Everything here runs on the event loop; the device thread does the work and answers once per turn.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from specsplit.core.codec import common, verifier
from specsplit.core.errors import InvalidRequest, Overloaded, SpecsplitError, Unavailable
from specsplit.core.serving import abort
from specsplit.core.tracing import SpanSink
from specsplit.core.types import Step, StepDone, VerifierDescription, VerifierEvent
from specsplit.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from specsplit.verifier.device import Device, Failed, Loaded, Outcome, StreamEnded, TurnDone
from specsplit.verifier.mailbox import EndOfCommands
from specsplit.verifier.metrics import Asked, Metrics
from specsplit.verifier.publisher import Publisher
from specsplit.verifier.sequence import Owner
from specsplit.verifier.tracing import span_of

log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _Stream:
    events: asyncio.Queue[VerifierEvent | StreamEnded | SpecsplitError] = field(default_factory=asyncio.Queue)
    num_steps_in_flight: int = 0
    asked: Asked = field(default_factory=Asked)


class VerifierService(verifier_pb2_grpc.VerifierServicer):
    """`load` runs on the device thread; `on_failure` is called when that thread ends after it was ready.

    `new_publisher`, if there is one, makes the publisher of what the loaded verifier caches; the service's
    metrics are registered in `metrics`, and its spans go to `spans`.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        *,
        max_steps_in_flight: int,
        on_failure: Callable[[], None],
        new_publisher: Callable[[VerifierDescription], Publisher] | None = None,
        metrics: CollectorRegistry | None = None,
        spans: SpanSink | None = None,
    ) -> None:
        self.failure: Exception | None = None
        self._max_steps_in_flight = max_steps_in_flight
        self._on_failure = on_failure
        self._new_publisher = new_publisher
        self._publisher: Publisher | None = None
        self._streams: dict[Owner, _Stream] = {}
        self._owners = itertools.count(1)
        self._counters: dict[str, int] = {}
        self._metrics = Metrics(metrics or CollectorRegistry(), self.counters)
        self._spans = spans
        self._is_drained = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._description: asyncio.Future[VerifierDescription] = loop.create_future()

        def on_outcome(outcome: Outcome) -> None:  # on the device thread
            loop.call_soon_threadsafe(self._receive, outcome)

        self._device = Device(load, on_outcome, max_steps_in_flight=max_steps_in_flight)

    async def start(self) -> None:
        """Returns when the model is loaded; raises what the loader raised."""
        self._device.start()
        description = await asyncio.shield(self._description)
        if self._new_publisher is not None:
            self._publisher = self._new_publisher(description)
            self._publisher.start()

    async def drain(self) -> None:
        """Opens nothing new and returns when no request is open."""
        self._device.drain()
        if self._publisher is not None:
            self._publisher.drain()
        await self._is_drained.wait()

    async def close(self) -> None:
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.stop, timeout=_STOP_SECONDS)
        await asyncio.to_thread(self._device.stop, timeout=_STOP_SECONDS)

    def counters(self) -> dict[str, int]:
        """Of the device and the publisher, as they last said; may be called from any thread."""
        published = self._publisher.counters() if self._publisher is not None else {}
        return {**self._counters, **published}

    # --- the device's answers -----------------------------------------------------------------------------

    def _receive(self, outcome: Outcome) -> None:
        match outcome:
            case Loaded():
                self._description.set_result(outcome.description)
            case TurnDone():
                self._counters = outcome.counters
                if self._publisher is not None and outcome.block_changes:
                    self._publisher.put(outcome.block_changes)
                if steps := [event for _, event in outcome.events if isinstance(event, StepDone)]:
                    self._metrics.batch(steps[0])
                for owner, event in self._traced(outcome):
                    if stream := self._streams.get(owner):  # else the client left meanwhile
                        stream.num_steps_in_flight -= isinstance(event, StepDone)
                        stream.events.put_nowait(event)
                        self._metrics.answered(stream.asked, event)
                if outcome.counters["is_draining"] and not outcome.counters["open_requests"]:
                    self._is_drained.set()
            case Failed():
                self._fail(outcome.error)

    def _traced(self, outcome: TurnDone) -> list[tuple[Owner, VerifierEvent | StreamEnded]]:
        """The events, with the context of a span of the batch if a sampled request was in it."""
        if self._spans is None or outcome.traced is None:
            return outcome.events
        steps = [event for _, event in outcome.events if isinstance(event, StepDone)]
        span = span_of(outcome.traced, steps, incarnation=self._description.result().incarnation)
        self._spans.put((span,))
        return [
            (owner, replace(event, traceparent=span.traceparent) if isinstance(event, StepDone) else event)
            for owner, event in outcome.events
        ]

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._counters["invariant_violations"] = self._counters.get("invariant_violations", 0) + 1
        self._is_drained.set()  # nothing will run any more
        if not self._description.done():
            self._description.set_exception(error)
            return
        for stream in self._streams.values():
            stream.events.put_nowait(Unavailable("the verifier failed"))
        self._on_failure()

    # --- RPCs ---------------------------------------------------------------------------------------------

    async def Describe(
        self, request: verifier_pb2.DescribeVerifierRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verifier_pb2.VerifierDescription:
        if not self._description.done() or self.failure:
            await abort(context, Unavailable("the model is not loaded"))
        return verifier.description_to_pb(self._description.result())

    async def Stats(
        self, request: common_pb2.StatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.StatsReply:
        return common.stats_to_pb({**self.counters(), "open_fds": len(os.listdir("/proc/self/fd"))})

    async def Run(
        self,
        request_iterator: AsyncIterator[verifier_pb2.VerifierCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[verifier_pb2.VerifierEvent]:
        if not self._description.done() or self.failure:
            await abort(context, Unavailable("the model is not loaded"))
        owner, stream = next(self._owners), _Stream()
        self._streams[owner] = stream
        self._device.connect(owner)
        reader = asyncio.ensure_future(self._read(owner, stream, request_iterator))
        # Runs however the call ends; a cancelled call may leave this generator where it is.
        context.add_done_callback(lambda _: self._end(owner, reader))  # type: ignore[arg-type]
        while not isinstance(event := await stream.events.get(), StreamEnded):
            if isinstance(event, SpecsplitError):
                await abort(context, event)
            yield verifier.event_to_pb(event)

    async def _read(
        self, owner: Owner, stream: _Stream, commands: AsyncIterator[verifier_pb2.VerifierCommand]
    ) -> None:
        """Passes commands on; a wrong one ends the stream with the reason."""
        try:
            async for pb in commands:
                command = verifier.command_from_pb(pb)
                if isinstance(command, Step):
                    stream.num_steps_in_flight += 1
                    if stream.num_steps_in_flight > self._max_steps_in_flight:
                        raise Overloaded(
                            f"more than max_steps_in_flight ({self._max_steps_in_flight}) steps",
                            field="max_steps_in_flight",
                        )
                self._device.submit(owner, command)
                stream.asked.add(command)
            self._device.submit(owner, EndOfCommands())
        except SpecsplitError as error:
            stream.events.put_nowait(error)
        except DecodeError:
            stream.events.put_nowait(InvalidRequest("not a VerifierCommand", field="command"))
        except Exception:
            log.exception("reading a stream failed")
            stream.events.put_nowait(SpecsplitError("reading the stream failed"))

    def _end(self, owner: Owner, reader: asyncio.Future[None]) -> None:
        reader.cancel()
        del self._streams[owner]
        self._device.disconnect(owner)
