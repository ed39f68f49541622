"""Says what the drafter service needs of a proposer; knows no transport and no way of proposing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from specsplit.core.types import SamplingParams, SparseDistribution, TokenIds

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Opening:
    """A request as the proposer first hears of it: all committed ids, the prompt's length, how it samples."""

    ids: TokenIds
    prompt_len: int
    sampling: SamplingParams | None


@dataclass(frozen=True, slots=True)
class Ask(Generic[State]):
    """Wants a draft of at most `max_draft` ids (at least 1) that continues everything `state` was given."""

    state: State
    max_draft: int


@dataclass(frozen=True, slots=True)
class Draft:
    """One proposal; empty when the proposer has nothing to say. One confidence per id."""

    ids: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    probs: tuple[SparseDistribution, ...] = ()
    match_len: int = 0


class Proposer(Protocol[State]):
    """Keeps one opaque state per open request; all rows of a batch are proposed for in one call."""

    @property
    def name(self) -> str: ...

    def open(self, opening: Opening) -> State:
        """State of a new request."""

    def extend(self, state: State, ids: TokenIds) -> None:
        """Appends committed ids; costs what is new."""

    def propose(self, asks: Sequence[Ask[State]]) -> list[Draft]:
        """One draft per ask, in their order."""

    def forget(self, state: State) -> None:
        """Frees what the state holds; it is not used again."""
