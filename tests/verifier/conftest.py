"""A scripted target that reads its context back through block tables, and a gateway small enough to trust."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import pytest
import torch

from specsplit.core.digest import TokenDigest, pack_ids
from specsplit.core.types import (
    CloseRequest,
    FinishReason,
    OpenRequest,
    Order,
    RowDone,
    SamplingParams,
    Status,
    Step,
    StepRow,
    new_request_id,
)
from specsplit.engine.batch import BLOCK_SIZE, Row
from specsplit.verifier.checks import Limits
from specsplit.verifier.core import BatchDone, VerifierCore

VOCAB = 48
EOS = 7
NAMESPACE = b"test-ns!"
UNWRITTEN = -1


def context_logits(context: Sequence[int]) -> torch.Tensor:
    """[VOCAB]: depends on every token of the context, with end-of-sequence likely enough to matter."""
    seed = int.from_bytes(blake2b(pack_ids(context), digest_size=7).digest(), "little")
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


class ContextModel:
    """Its KV of a position is the token there; logits come from what the block table says, not from the row.

    `broken_ids` make NaN logits, `failing_ids` an exception, when they are among the tokens computed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.kv = [UNWRITTEN] * (num_blocks * BLOCK_SIZE)
        self.broken_ids: set[int] = set()
        self.failing_ids: set[int] = set()
        self.before_step: Callable[[], None] = lambda: None
        self.num_computed = 0

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        self.before_step()
        owners: dict[int, int] = {}
        out = []
        for number, row in enumerate(rows):
            if self.failing_ids & set(row.token_ids):
                raise RuntimeError("planted failure")
            end = row.start + len(row.token_ids)
            assert len(row.block_table) == -(-end // BLOCK_SIZE), "no block more than is needed"
            assert len(set(row.block_table)) == len(row.block_table)
            slots = [row.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(end)]
            for position, id_ in enumerate(row.token_ids, row.start):
                assert owners.setdefault(row.block_table[position // BLOCK_SIZE], number) == number
                self.kv[slots[position]] = id_
            self.num_computed += len(row.token_ids)
            context = [self.kv[slot] for slot in slots]
            assert UNWRITTEN not in context
            for length in range(end - row.num_logits + 1, end + 1):
                logits = context_logits(context[:length])
                if self.broken_ids & set(context[:length]):
                    logits[3] = torch.nan
                out.append(logits)
        return torch.stack(out) if out else torch.empty(0, VOCAB)


def make_limits(**changes: int) -> Limits:
    limits = Limits(
        vocab_size=VOCAB, num_blocks=64, max_sequence_tokens=256, max_step_tokens=512, max_step_rows=64
    )
    return replace(limits, **changes)


def make_core(**changes: int) -> tuple[VerifierCore, ContextModel]:
    limits = make_limits(**changes)
    model = ContextModel(limits.num_blocks)
    return VerifierCore(model, limits, eos_token_ids=(EOS, 10**6), namespace=NAMESPACE), model


@dataclass
class Client:
    """One request as a gateway keeps it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    request_id: bytes = field(default_factory=new_request_id)
    priority: int = 0
    arrival_us: int = 0
    salt: bytes = b""
    outputs: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    generation: int = 1
    num_computed: int = 0
    num_cached: int = 0
    finish: FinishReason | None = None
    accepted: int = 0

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.outputs]

    def open_request(self) -> OpenRequest:
        return OpenRequest(
            self.request_id,
            self.generation,
            Order(self.priority, self.arrival_us, self.request_id),
            self.prompt,
            tuple(self.outputs),
            self.sampling,
            cache_salt=self.salt,
        )

    def row(self, draft: Sequence[int] = (), chunk: int | None = None) -> StepRow:
        todo = len(self.ids) - self.num_computed
        num_tokens = todo if chunk is None else min(chunk, todo)
        return StepRow(
            self.request_id,
            self.generation,
            len(self.ids),
            TokenDigest(self.ids).value,
            self.num_computed,
            num_tokens,
            tuple(draft) if num_tokens == todo else (),
        )

    def take(self, done: RowDone) -> None:
        assert done.status is Status.OK, done
        assert done.base_len == len(self.ids)
        self.outputs += done.committed_ids
        self.margins += done.margins
        self.num_computed = done.num_computed
        self.finish = done.finish_reason
        self.accepted += done.num_accepted

    def close_request(self) -> CloseRequest:
        return CloseRequest(self.request_id, self.generation)


class Harness:
    """Drives a core as gateways would and checks it after every command."""

    def __init__(self, core: VerifierCore, owner: int = 1) -> None:
        self.core = core
        self.owner = owner
        self.num_steps = 0

    def check(self) -> None:
        self.core.pool.check_invariants(s.block_table for s in self.core.sequences.values())
        for sequence in self.core.sequences.values():
            if sequence.finish_reason is None:
                assert len(sequence.block_table) == -(-sequence.num_computed // BLOCK_SIZE)
            assert sequence.num_cached_blocks == len(sequence.block_table) - (
                sequence.num_computed % BLOCK_SIZE > 0 and bool(sequence.block_table)
            )

    def open(self, client: Client) -> Client:
        opened = self.core.open(self.owner, client.open_request())
        assert opened.status is Status.OK, opened
        client.num_computed = client.num_cached = opened.cached_tokens
        self.check()
        return client

    def close(self, client: Client) -> None:
        self.core.close(self.owner, client.close_request())
        self.check()

    def step_rows(self, rows: Sequence[StepRow]) -> tuple[RowDone, ...]:
        return self.step(rows).steps[0]

    def step(self, rows: Sequence[StepRow]) -> BatchDone:
        self.num_steps += 1
        done = self.core.step([(self.owner, Step(self.num_steps, tuple(rows)))])
        self.check()
        return done

    def finish(
        self,
        clients: Sequence[Client],
        draft: Callable[[Client], Sequence[int]] = lambda client: (),
        *,
        rng: random.Random | None = None,
        max_chunk: int | None = None,
        max_rows: int = 64,
    ) -> None:
        """Steps the opened `clients` to their ends; re-opens what is preempted, first in order first."""
        waiting: list[Client] = []
        running = list(clients)
        while running or waiting:
            rows = rng.sample(running, k=min(len(running), max_rows)) if rng else running[:max_rows]
            chunk = rng.randint(1, max_chunk) if rng and max_chunk else max_chunk
            done = self.step([client.row(draft(client), chunk) for client in rows])
            lost = {preempted.request_id for _, preempted in done.preempted}
            for client, row_done in zip(rows, done.steps[0], strict=True):
                if row_done.status is Status.PREEMPTED:
                    assert client.request_id in lost
                else:
                    client.take(row_done)
                if client.finish:
                    running.remove(client)
                    self.close(client)
            waiting += [client for client in running if client.request_id in lost]
            running = [client for client in running if client.request_id not in lost]
            if waiting and (not running or (not lost and self.core.pool.num_free > 2)):
                client = min(waiting, key=lambda c: (c.priority, c.arrival_us, c.request_id))
                waiting.remove(client)
                client.generation += 1
                running.append(self.open(client))


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def kit() -> type:
    """The helpers above by name: test files do not import each other."""

    class Kit:
        core = staticmethod(make_core)
        limits = staticmethod(make_limits)
        client = Client
        harness = Harness
        model = ContextModel
        logits = staticmethod(context_logits)
        vocab, eos = VOCAB, EOS

    return Kit


@pytest.fixture
def alone() -> Callable[..., Client]:
    """The same request sent alone with no drafts."""

    def run(client: Client, **changes: int) -> Client:
        core, _ = make_core(**changes)
        copy = Client(client.prompt, client.sampling, salt=client.salt)
        harness = Harness(core)
        harness.finish([harness.open(copy)])
        assert core.pool.num_free == core.pool.num_blocks
        return copy

    return run
