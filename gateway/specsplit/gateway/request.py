"""What the two halves of the gateway say to each other: an admitted request, and who generates for it.

The APIs (HTTP, gRPC) validate and tokenise a client's `GenerateRequest` into an `AdmittedRequest`; the engine
of the gateway turns that into `GenerateEvent`s. Neither half knows the other's inside.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol

from specsplit.core.trace_context import TraceContext
from specsplit.core.types import GenerateEvent, ModelCard, Order, RequestId, SamplingParams, TokenIds


@dataclass(frozen=True, slots=True)
class Limits:
    """What the verifier can take; known once it has described itself."""

    vocab_size: int
    max_sequence_tokens: int


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that passed every check: nothing in it can be refused for its values later.

    `k` is the longest draft per step, 0 is off. `stop` holds non-empty strings. `model` and `is_chat` (the
    prompt was a conversation) are for those who watch.
    """

    request_id: RequestId
    order: Order
    prompt_ids: TokenIds
    sampling: SamplingParams
    stop: tuple[str, ...]
    k: int
    trace: TraceContext
    cache_salt: bytes = b""
    model: str = ""
    is_chat: bool = False


class Generator(Protocol):
    """The engine of the gateway as the APIs see it."""

    @property
    def is_ready(self) -> bool:
        """A verifier is connected and described."""
        ...

    def model(self) -> ModelCard:
        """Raises Unavailable until a verifier has described itself."""
        ...

    def limits(self) -> Limits:
        """Raises Unavailable until a verifier has described itself."""
        ...

    def generate(self, request: AdmittedRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Started, Deltas, Finished; raises a SpecsplitError when the request cannot be finished.

        Overloaded is raised before Started when too many requests are admitted. Closing the generator (or
        cancelling the task that iterates it) cancels the request and frees everything it held everywhere.
        """
        ...

    def counters(self) -> Mapping[str, int]:
        """Table sizes and counts for Stats."""
        ...
