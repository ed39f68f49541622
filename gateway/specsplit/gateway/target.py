"""The gateway's end of one verifier: its stream, what it is, its free memory, the step outstanding there.

Knows no requests: what concerns one is handed to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from specsplit.core.errors import ProtocolError, Unavailable
from specsplit.core.types import (
    Capacity,
    CloseRequest,
    Opened,
    OpenRequest,
    Preempted,
    Step,
    StepDone,
    VerifierCommand,
    VerifierDescription,
    VerifierEvent,
)
from specsplit.gateway.link import Link
from specsplit.gateway.wires import VerifierWire

log = logging.getLogger(__name__)


class Target:
    """`accept` may refuse a verifier by raising ProtocolError; `on_up` hears that it takes requests,
    `on_event` all events but StepDone,
    `on_lost` that everything open there is gone."""

    def __init__(
        self,
        address: str,
        *,
        step_timeout_seconds: float,
        counters: Counter[str],
        accept: Callable[[VerifierDescription], None],
        on_up: Callable[[], None],
        on_event: Callable[[Capacity | Opened | Preempted], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.free_blocks = 0
        self.is_draining = False
        self.down_since: float | None = None  # until a verifier has said its capacity
        self.last_description: VerifierDescription | None = None  # of the last verifier accepted
        self._step_timeout_seconds = step_timeout_seconds
        self._counters = counters
        self._accept_description = accept
        self._on_up = on_up
        self._on_other_event = on_event
        self._on_lost = on_lost
        self._outstanding: tuple[int, asyncio.Future[StepDone]] | None = None
        self.link: Link[VerifierDescription, VerifierCommand, VerifierEvent] = Link(
            "verifier",
            address,
            VerifierWire(),
            accept=self._accept,
            on_event=self._on_event,
            on_down=self._on_down,
        )

    @property
    def is_ready(self) -> bool:
        return self.link.is_up and self.down_since is None

    @property
    def description(self) -> VerifierDescription:
        """Raises Unavailable until a verifier has described itself; stays while it is away."""
        if self.last_description is None:
            raise Unavailable("no verifier is connected yet")
        return self.last_description

    def open(self, request: OpenRequest) -> None:
        self.link.send(request)

    def close(self, request: CloseRequest) -> None:
        """A verifier that is away has forgotten the request already."""
        if self.link.is_up:
            self.link.send(request)

    async def verify(self, step: Step) -> StepDone | None:
        """The answer, or None when the stream broke; its requests then have to be opened again."""
        if not self.link.is_up:
            return None
        assert self._outstanding is None, "one step at a time"
        answer: asyncio.Future[StepDone] = asyncio.get_running_loop().create_future()
        self._outstanding = (step.step_id, answer)
        self.link.send(step)
        done, _ = await asyncio.wait((answer,), timeout=self._step_timeout_seconds)
        if not done:
            self._counters["step_timeouts"] += 1
            self.link.drop(f"no answer to step {step.step_id}")
            await asyncio.wait((answer,))  # cancelled when the stream is down
        if answer.cancelled():
            return None
        self.free_blocks = answer.result().free_blocks
        return answer.result()

    def violated(self, what: str) -> None:
        """A broken invariant, here or there: counted and said."""
        self._counters["invariant_violations"] += 1
        log.error("invariant violated: %s", what)

    def _accept(self, description: VerifierDescription) -> None:
        self._accept_description(description)
        self.last_description = description
        if self.down_since is None:
            self.down_since = time.monotonic()
        self.free_blocks = description.num_blocks
        self.is_draining = False

    def _on_event(self, event: VerifierEvent) -> None:
        if isinstance(event, StepDone):
            if self._outstanding is None or event.step_id != self._outstanding[0]:
                self.violated(f"the verifier answered step {event.step_id}, not outstanding")
                raise ProtocolError(f"answer to step {event.step_id}, which is not outstanding")
            _, answer = self._outstanding
            self._outstanding = None
            answer.set_result(event)
            return
        self.free_blocks = event.free_blocks
        is_first = isinstance(event, Capacity) and self.down_since is not None
        if is_first:
            self.down_since = None
        self._on_other_event(event)
        if is_first:
            self._on_up()

    def _on_down(self) -> None:
        if self.down_since is None:
            self.down_since = time.monotonic()
        self._counters["verifier_lost"] += 1
        if self._outstanding is not None:
            self._outstanding[1].cancel()
            self._outstanding = None
        self._on_lost()
