"""One self-healing bidirectional gRPC stream to a service. Knows no requests and no steps.

The link describes the peer, opens the stream, and hands over what arrives; when the stream breaks it says so
once and connects again until it is stopped. Commands can only be sent while the link is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from specsplit.core.errors import ProtocolError, SpecsplitError
from specsplit.core.serving import open_channel

log = logging.getLogger(__name__)

DescriptionT = TypeVar("DescriptionT", covariant=True)
CommandT = TypeVar("CommandT", contravariant=True)
EventT = TypeVar("EventT", covariant=True)
D = TypeVar("D")
C = TypeVar("C")
E = TypeVar("E")

RECONNECT_SECONDS = 0.1


class Wire(Protocol[DescriptionT, CommandT, EventT]):
    """How one service's stream is described, opened, and converted."""

    async def describe(self, channel: grpc.aio.Channel) -> DescriptionT: ...
    def open(self, channel: grpc.aio.Channel, commands: AsyncIterator[Any]) -> Any: ...
    def encode(self, command: CommandT) -> Any: ...
    def decode(self, event: Any) -> EventT: ...


class Link(Generic[D, C, E]):
    """`accept` may refuse a description by raising ProtocolError; the link stays down and tries again."""

    def __init__(
        self,
        name: str,
        address: str,
        wire: Wire[D, C, E],
        *,
        accept: Callable[[D], None],
        on_event: Callable[[E], None],
        on_down: Callable[[], None],
    ) -> None:
        self.name = name
        self.address = address
        self.epoch = 0  # streams opened so far; state sent on an earlier one is gone
        self.codec_ns = 0  # CPU time of conversions, for the gateway's own time per step
        self._wire = wire
        self._accept = accept
        self._on_event = on_event
        self._on_down = on_down
        self._commands: asyncio.Queue[C | None] | None = None
        self._call: Any = None

    @property
    def is_up(self) -> bool:
        return self._commands is not None

    def send(self, command: C) -> None:
        """Queues a command; raises ProtocolError while the link is down."""
        if self._commands is None:
            raise ProtocolError(f"{self.name} at {self.address} is not connected")
        self._commands.put_nowait(command)

    def drop(self, reason: str) -> None:
        """Gives the current stream up, for a peer that does not answer; the link connects again."""
        log.warning("%s at %s: giving the stream up: %s", self.name, self.address, reason)
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        """Connects and reads until cancelled."""
        last_reason = ""
        async with contextlib.AsyncExitStack() as stack:
            channel = open_channel(self.address)
            stack.push_async_callback(channel.close)
            while True:
                try:
                    description = await self._wire.describe(channel)
                    self._accept(description)
                    last_reason = await self._read(channel)
                    log.warning("%s at %s: stream lost: %s", self.name, self.address, last_reason)
                except (grpc.aio.AioRpcError, SpecsplitError) as error:
                    reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                    if reason != last_reason:  # say each new reason once, not ten times a second
                        last_reason = reason or ""
                        log.warning("%s at %s: not connected: %s", self.name, self.address, reason)
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _read(self, channel: grpc.aio.Channel) -> str:
        """Reads one stream to its end; returns why it ended."""
        commands: asyncio.Queue[C | None] = asyncio.Queue()
        call = self._wire.open(channel, self._encoded(commands))
        self._commands, self._call = commands, call
        self.epoch += 1
        log.info("%s at %s: connected", self.name, self.address)
        try:
            async for message in call:
                start = time.perf_counter_ns()
                event = self._wire.decode(message)
                self.codec_ns += time.perf_counter_ns() - start
                self._on_event(event)
            return "ended by the peer"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            if call.cancelled() and not _is_cancelling():
                return "given up here"
            raise
        finally:
            call.cancel()
            commands.put_nowait(None)  # a call that the peer ended leaves its reader of commands waiting
            self._commands = self._call = None
            self._on_down()

    async def _encoded(self, commands: asyncio.Queue[C | None]) -> AsyncIterator[Any]:
        while (command := await commands.get()) is not None:
            start = time.perf_counter_ns()
            message = self._wire.encode(command)
            self.codec_ns += time.perf_counter_ns() - start
            yield message


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def gather_forever(*runners: Callable[[], Awaitable[None]]) -> None:
    """Runs all until one fails, then cancels the rest and raises."""
    async with asyncio.TaskGroup() as group:
        for runner in runners:
            group.create_task(_as_coroutine(runner))


async def _as_coroutine(runner: Callable[[], Awaitable[None]]) -> None:
    await runner()
