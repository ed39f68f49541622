"""Commands of all streams waiting for the device: in order within a stream, by turns between streams.

Knows nothing of what commands do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from specsplit.core.types import CloseRequest, OpenRequest, Step
from specsplit.verifier.checks import num_step_tokens
from specsplit.verifier.sequence import Owner


@dataclass(frozen=True, slots=True)
class EndOfCommands:
    """The stream sends no more; what it sent before is still answered."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A command and when it came, on the monotonic clock."""

    command: OpenRequest | CloseRequest | Step | EndOfCommands
    received_at: float


class Mailbox:
    def __init__(self, *, max_step_tokens: int, max_step_rows: int) -> None:
        self._max_tokens = max_step_tokens
        self._max_rows = max_step_rows
        self._queues: dict[Owner, deque[Waiting]] = {}
        self._turn: deque[Owner] = deque()  # the next stream to be served first

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._queues

    @property
    def owners(self) -> list[Owner]:
        return list(self._turn)

    @property
    def is_empty(self) -> bool:
        return not any(self._queues.values())

    def add_stream(self, owner: Owner) -> None:
        self._queues[owner] = deque()
        self._turn.append(owner)

    def remove_stream(self, owner: Owner) -> None:
        """What it still waited for is dropped."""
        del self._queues[owner]
        self._turn.remove(owner)

    def put(self, owner: Owner, waiting: Waiting) -> None:
        self._queues[owner].append(waiting)

    def take_until_steps(self) -> Iterator[tuple[Owner, OpenRequest | CloseRequest | EndOfCommands]]:
        """All commands up to the first step of each stream."""
        for owner in self.owners:
            queue = self._queues[owner]
            while queue and not isinstance(queue[0].command, Step):
                command = queue.popleft().command
                assert not isinstance(command, Step)
                yield owner, command

    def take_steps(self) -> list[tuple[Owner, Step, float]]:
        """The step at the head of each stream, from the stream whose turn it is until the budget is full.

        The first one is taken whatever its size. The stream that did not fit has the next turn.
        """
        taken: list[tuple[Owner, Step, float]] = []
        num_tokens = num_rows = 0
        for owner in self.owners:
            queue = self._queues[owner]
            if queue:
                step = queue[0].command
                assert isinstance(step, Step), "take_until_steps comes first"
                num_tokens += num_step_tokens(step)
                num_rows += len(step.rows)
                if taken and (num_tokens > self._max_tokens or num_rows > self._max_rows):
                    break
                taken.append((owner, step, queue.popleft().received_at))
            self._turn.rotate(-1)
        return taken
