"""Owns all admitted requests: places each at a verifier replica, and again when that one is lost or drains.

Knows no client API and no steps.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping

from specsplit.core.block_hash import block_hashes
from specsplit.core.errors import Overloaded, ProtocolError, SpecsplitError, Unavailable
from specsplit.core.types import (
    WIRE_VERSION,
    Finished,
    GenerateEvent,
    ModelCard,
    RequestId,
    Started,
    VerifierDescription,
)
from specsplit.gateway.link import gather_forever
from specsplit.gateway.records import FINISHED, Reporter, RequestRecord
from specsplit.gateway.registry import RegistryReader
from specsplit.gateway.replica import Replica
from specsplit.gateway.request import AdmittedRequest, Limits
from specsplit.gateway.routing import Candidate, Router
from specsplit.gateway.scheduler import in_order
from specsplit.gateway.sequence import Phase, Sequence
from specsplit.gateway.settings import GatewaySettings
from specsplit.gateway.text.tokenizer import Tokenizer

WATCH_SECONDS = 1.0
COUNTERS = (  # those that are shown also while they are 0
    "requests_admitted",
    "requests_cancelled",
    "steps",
    "step_rows",
    "step_timeouts",
    "open_timeouts",
    "preempted",
    "verifier_lost",
    "draft_timeouts",
    "draft_skipped_steps",
    "draft_refused",
    "routed_by_registry",
    "routed_by_memory",
    "invariant_violations",
)


class Dispatcher:
    """The `Generator` of the APIs and the owner of the replicas. `run` must be running."""

    def __init__(self, settings: GatewaySettings, tokenizer: Tokenizer, reporter: Reporter) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._reporter = reporter
        self._sequences: dict[RequestId, Sequence] = {}
        self._placed: dict[RequestId, Replica] = {}
        self._routing: set[RequestId] = set()  # whose answer from the registry is awaited
        self._empty = asyncio.Event()  # set each time the last request leaves
        self._is_draining = False
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._router = Router(seed=time.time_ns())
        self._registry: RegistryReader | None = None
        if settings.redis_url is not None:
            self._registry = RegistryReader(
                settings.redis_url,
                timeout_seconds=settings.registry_timeout_ms / 1000,
                counters=self._counters,
            )
        self._served: VerifierDescription | None = None  # the first one accepted: all must be alike
        self._replicas = {
            address: Replica(
                address,
                settings,
                owner=self,
                counters=self._counters,
                reporter=reporter,
                tokenizer_digest=tokenizer.digest,
            )
            for address in settings.verifiers
        }

    # --- what the APIs see --------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return not self._is_draining and any(replica.is_up for replica in self._replicas.values())

    def model(self) -> ModelCard:
        return ModelCard(
            self._settings.model_name or self._description().model, self.limits().max_sequence_tokens
        )

    def limits(self) -> Limits:
        """What every replica seen so far can take: a request may have to move to any of them."""
        vocab_size = self._description().vocab_size
        descriptions = [r.description for r in self._replicas.values() if r.description is not None]
        return Limits(vocab_size, min(d.max_sequence_tokens for d in descriptions))

    def counters(self) -> Mapping[str, int]:
        phases = Counter(sequence.phase for sequence in self._sequences.values())
        replicas = list(self._replicas.values())
        counters = {
            "requests": len(self._sequences),
            **{f"requests_{phase.value}": phases[phase] for phase in Phase},
            "verifier_up": sum(replica.is_up for replica in replicas),
            "drafter_up": int(any(replica.is_drafter_up for replica in replicas)),
            "free_blocks": sum(replica.free_blocks for replica in replicas),
            "codec_us": sum(replica.codec_ns for replica in replicas) // 1000,
            **self._counters,
        }
        if self._registry is not None:
            counters["registry_circuit_open"] = int(self._registry.is_open)
        for index, replica in enumerate(replicas):
            counters[f"replica_{index}_up"] = int(replica.is_up)
            counters[f"replica_{index}_requests"] = replica.num_requests
            counters[f"replica_{index}_free_blocks"] = replica.free_blocks
            for name in ("prompt_tokens", "cached_tokens", "predicted_cached_tokens"):
                counters[f"replica_{index}_{name}"] = replica.counters[name]
        return counters

    async def generate(self, request: AdmittedRequest) -> AsyncGenerator[GenerateEvent, None]:
        if self._is_draining:
            raise Unavailable("the gateway is shutting down")
        if len(self._sequences) >= self._settings.max_requests:
            raise Overloaded(f"{len(self._sequences)} requests are admitted already")
        assert request.request_id not in self._sequences
        sequence = Sequence(request, self._tokenizer, admitted_ns=time.time_ns())
        self._sequences[request.request_id] = sequence
        self._empty.clear()
        self._counters["requests_admitted"] += 1
        self._reporter.admitted(request, at_ns=sequence.admitted_ns)
        try:
            await self._route(sequence)
            yield Started(request.request_id, request.prompt_ids, request.sampling.seed)
            while True:
                event = await sequence.events.get()
                if isinstance(event, SpecsplitError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            if sequence.phase is not Phase.FINISHED:
                self._counters["requests_cancelled"] += 1
                self._abandon(sequence, "cancelled")

    async def drain(self) -> None:
        """Refuses new requests and returns when none is left."""
        self._is_draining = True
        if self._sequences:
            await self._empty.wait()

    def stop(self) -> None:
        """Ends the requests that are left: their time to drain is over."""
        for sequence in list(self._sequences.values()):
            error = Unavailable("the gateway is shutting down")
            sequence.fail(error)
            self._abandon(sequence, error.code)

    async def run(self) -> None:
        """Runs until cancelled; a broken invariant raises."""
        try:
            await gather_forever(self._watch, *(replica.run for replica in self._replicas.values()))
        finally:
            if self._registry is not None:
                await self._registry.close()

    # --- placing ------------------------------------------------------------------------------------------

    async def _route(self, sequence: Sequence) -> None:
        """Asks the registry where the prompt is cached, if there is a choice, and places the request."""
        registered = None
        if self._registry is not None and sum(replica.can_open for replica in self._replicas.values()) > 1:
            self._routing.add(sequence.request.request_id)
            try:
                hashes = await asyncio.to_thread(self._hashes, sequence)  # 10 ms for 32,000 tokens
                if hashes:
                    registered = await self._registry.lookup(self._description().registry_namespace, hashes)
            finally:
                self._routing.discard(sequence.request.request_id)
        is_waiting = sequence.phase is Phase.WAITING and sequence.request.request_id not in self._placed
        if is_waiting:  # else it failed meanwhile, or a replica that came up took it
            self._place(sequence, registered)

    def _place(self, sequence: Sequence, registered: Mapping[bytes, int] | None = None) -> None:
        """At the replica where it costs least; where there is none, it waits for `on_up`."""
        candidates = self._candidates()
        if not candidates:
            return
        address = candidates[0].address
        if len(self._replicas) > 1:
            block_size = self._description().block_size
            choice = self._router.choose(
                candidates,
                hashes=self._hashes(sequence),
                num_prompt_tokens=len(sequence.token_ids),
                block_size=block_size,
                registered=registered,
                now=time.monotonic(),
            )
            address = choice.address
            self._counters["routed_by_memory" if registered is None else "routed_by_registry"] += 1
            if sequence.opened_ns is None:
                sequence.predicted_cached_tokens = choice.cached_blocks * block_size
        replica = self._replicas[address]
        self._placed[sequence.request.request_id] = replica
        replica.place(sequence)

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(
                replica.address,
                replica.description.incarnation,
                replica.description.num_blocks,
                replica.load(),
            )
            for replica in self._replicas.values()
            if replica.can_open and replica.description is not None
        ]

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        """Of the full blocks that a verifier may take from its cache: never that of the last token."""
        if sequence.block_hashes is None:
            description = self._description()
            sequence.block_hashes = block_hashes(
                description.registry_namespace,
                sequence.request.prompt_ids[:-1],
                block_size=description.block_size,
                cache_salt=sequence.request.cache_salt,
            )
        return sequence.block_hashes

    # --- what the replicas say ----------------------------------------------------------------------------

    def accept(self, description: VerifierDescription) -> None:
        """All verifiers of a gateway must give the same text, so that requests can move between them."""
        if description.wire_version != WIRE_VERSION:
            raise ProtocolError(f"wire version {description.wire_version}, not {WIRE_VERSION}")
        if description.tokenizer_digest not in ("", self._tokenizer.digest):
            raise ProtocolError(
                f"the verifier's tokenizer {description.tokenizer_digest} is not "
                f"{self._tokenizer.digest}, the gateway's"
            )
        if self._served is not None and _identity(description) != _identity(self._served):
            raise ProtocolError(f"{description} is not the verifier served before, {self._served}")
        self._served = description

    def on_up(self) -> None:
        if len(self._placed) == len(self._sequences):
            return
        for sequence in in_order(self._sequences.values()):
            request_id = sequence.request.request_id
            if (
                sequence.phase is Phase.WAITING
                and request_id not in self._placed
                and request_id not in self._routing
            ):
                self._place(sequence)

    def on_returned(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            del self._placed[sequence.request.request_id]
        for sequence in in_order(sequences):
            self._place(sequence)

    def on_ended(self, sequence: Sequence, outcome: str) -> None:
        del self._placed[sequence.request.request_id]
        self._forget(sequence, outcome)

    def _description(self) -> VerifierDescription:
        if self._served is None:
            raise Unavailable("no verifier is connected yet")
        return self._served

    # --- the end of a request -----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Fails the requests when no verifier has come back for too long."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            down = [replica.down_since for replica in self._replicas.values() if not replica.is_up]
            if len(down) < len(self._replicas):
                continue
            since = max((at for at in down if at is not None), default=None)  # the last one to go
            if since is not None and time.monotonic() - since > self._settings.verifier_wait_seconds:
                for sequence in list(self._sequences.values()):
                    error = Unavailable("no verifier answered in time")
                    sequence.fail(error)
                    self._abandon(sequence, error.code)

    def _abandon(self, sequence: Sequence, outcome: str) -> None:
        """The end of a request that its replica, if it has one, does not know of."""
        replica = self._placed.pop(sequence.request.request_id, None)
        if replica is not None:
            replica.release(sequence)
        sequence.phase = Phase.FINISHED
        self._forget(sequence, outcome)
        self._reporter.flush_soon()

    def _forget(self, sequence: Sequence, outcome: str) -> None:
        del self._sequences[sequence.request.request_id]
        if outcome not in (*FINISHED, "cancelled"):
            self._counters[f"failed_{outcome}"] += 1
        self._reporter.ended(self._record(sequence, outcome))
        if not self._sequences:
            self._empty.set()

    def _record(self, sequence: Sequence, outcome: str) -> RequestRecord:
        return RequestRecord(
            request=sequence.request,
            outcome=outcome,
            usage=sequence.usage(),
            output_ids=tuple(sequence.token_ids[sequence.num_prompt :]),
            admitted_ns=sequence.admitted_ns,
            opened_ns=sequence.opened_ns,
            first_token_ns=sequence.first_token_ns,
            ended_ns=time.time_ns(),
            replicas=tuple(sequence.replicas),
            drafter=next((r.drafter_name for r in self._replicas.values() if r.drafter_name), ""),
            num_opens=sequence.generation,
            num_preempted=sequence.num_preempted,
            predicted_cached_tokens=sequence.predicted_cached_tokens,
        )


def _identity(d: VerifierDescription) -> tuple[object, ...]:
    """What must not differ between verifiers that serve one request: all but sizes and incarnation."""
    return (
        *(d.model, d.revision, d.dtype, d.numerics, d.tokenizer_digest, d.vocab_size, d.eos_token_ids),
        *(d.block_size, d.registry_namespace),
    )
