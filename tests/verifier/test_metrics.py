"""The verifier's metrics against a real service: each number from what gateways sent and were told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from metrics_check import Everything, Scraped, documented, read
from prometheus_client import CollectorRegistry
from redis_server import free_port

from specsplit.core.codec import verifier
from specsplit.core.metrics import new_registry
from specsplit.core.serving import open_channel
from specsplit.core.types import (
    Opened,
    RowDone,
    SamplingParams,
    Status,
    Step,
    StepDone,
    StepRow,
    VerifierDescription,
)
from specsplit.v1 import verifier_pb2_grpc
from specsplit.verifier.device import Loaded
from specsplit.verifier.metrics import Asked, Metrics
from specsplit.verifier.publisher import Publisher
from specsplit.verifier.service import VerifierService

P = "specsplit_verifier_"
SAMPLING = SamplingParams(max_tokens=12, seed=3, temperature=0.8, ignore_eos=True)
PROMPT = tuple(range(40))


class Stream:
    """A gateway that asks one thing at a time."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = verifier_pb2_grpc.VerifierStub(channel).Run()
        self.num_steps = 0

    async def ask(self, command: Any) -> Any:
        await self.call.write(verifier.command_to_pb(command))
        while not isinstance(event := verifier.event_from_pb(await self.call.read()), (Opened, StepDone)):
            pass
        return event

    async def step(self, *rows: StepRow) -> tuple[RowDone, ...]:
        self.num_steps += 1
        done: StepDone = await self.ask(Step(self.num_steps, rows))
        return done.rows


Serve = Callable[..., Any]


@pytest.fixture
def serve(kit: Any) -> Serve:
    """A service on a real server: a function that opens streams, and one that scrapes."""

    @asynccontextmanager
    async def running(
        *, new_publisher: Callable[[VerifierDescription], Publisher] | None = None, **limits: int
    ) -> AsyncIterator[tuple[Callable[[], Stream], Callable[[], Scraped]]]:
        core, _ = kit.core(**limits)
        description = VerifierDescription(
            *("scripted", "", "float32", "test", "", core.limits.vocab_size, 256, 16, 64, 512, 64),
            *(bytes(16), bytes(8), (7,)),
        )
        registry = new_registry("verifier", restarts=1)
        service = VerifierService(
            lambda: Loaded(core, description),
            max_steps_in_flight=2,
            on_failure=lambda: None,
            new_publisher=new_publisher,
            metrics=registry,
        )
        server = grpc.aio.server()
        verifier_pb2_grpc.add_VerifierServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        assert read(registry).without_samples >= {f"{P}blocks", f"{P}steps_total"}, "nothing is loaded yet"
        await service.start()
        try:
            async with open_channel(f"127.0.0.1:{port}") as channel:
                yield lambda: Stream(channel), lambda: read(registry)
        finally:
            await service.close()
            await server.stop(None)

    return running


async def until(scrape: Callable[[], Scraped], name: str, value: float) -> Scraped:
    """Scrapes until a number is as wanted; the test's own time-out ends a wait in vain."""
    while (seen := await asyncio.to_thread(scrape))(P + name) != value:
        pass
    return seen


async def test_batches_rows_tokens_and_acceptance(kit: Any, alone: Any, serve: Serve) -> None:
    client = kit.client(PROMPT, SAMPLING)
    truth = alone(client).outputs
    wrong = (truth[4] + 1) % kit.vocab
    async with serve() as (stream, scrape):
        gateway = stream()
        await gateway.ask(client.open_request())
        client.take((await gateway.step(client.row(chunk=30)))[0])
        client.take((await gateway.step(client.row()))[0])
        client.take((await gateway.step(client.row(draft=truth[1:3])))[0])  # all accepted, and a bonus token
        client.take((await gateway.step(client.row(draft=[wrong, truth[5], truth[6]])))[0])  # none
        seen = scrape()
        assert client.outputs == truth[:5]
        assert (seen(f"{P}steps_total"), seen(f"{P}batches_total")) == (4, 4)
        assert seen(f"{P}batch_rows_count") == seen(f"{P}batch_rows_sum") == 4
        assert seen(f"{P}batch_tokens_sum") == 30 + 10 + 3 + 4
        assert seen(f"{P}committed_tokens_total") == 5
        drafted = [seen(f"{P}drafted_tokens_total", position=str(n)) for n in range(4)]
        accepted = [seen(f"{P}accepted_tokens_total", position=str(n)) for n in range(4)]
        assert (drafted, accepted) == ([2, 2, 1, 0], [1, 1, 0, 0])
        assert seen(f"{P}rows_total", status="ok") == 4
        for name in ("forward", "sample", "idle", "queue"):
            assert seen(f"{P}{name}_seconds_count") == 4, name
            assert 0 < seen(f"{P}{name}_seconds_sum") < 60, name
        assert (seen(f"{P}open_requests"), seen(f"{P}streams"), seen(f"{P}blocks")) == (1, 1, 64)
        assert seen(f"{P}free_blocks") == 64 - 3
        unknown = {name for name in seen.without_samples if "registry" not in name}
        assert not unknown, "counters that neither device nor service has"
        await gateway.call.write(verifier.command_to_pb(client.close_request()))
        await until(scrape, "open_requests", 0)
        gateway.call.cancel()
        await until(scrape, "streams", 0)


async def test_a_verdict_counts_once_and_refusals_by_status(kit: Any, serve: Serve) -> None:
    client, unknown = kit.client(PROMPT, SAMPLING), kit.client(PROMPT, SAMPLING)
    async with serve() as (stream, scrape):
        gateway = stream()
        await gateway.ask(client.open_request())
        client.take((await gateway.step(client.row()))[0])
        row = client.row(draft=[1, 2])
        before = await gateway.step(row)
        again = await gateway.step(row)
        assert (again[0].is_replay, again[0].committed_ids) == (True, before[0].committed_ids)
        client.take(before[0])
        await gateway.step(unknown.row(draft=[1, 2, 3]), replace(client.row(draft=[3]), digest=1))
        assert (await gateway.ask(client.open_request())).status is Status.STALE_GENERATION
        seen = scrape()
    assert seen(f"{P}replays_total") == 1
    assert [seen(f"{P}drafted_tokens_total", position=str(n)) for n in range(3)] == [1, 1, 0]
    assert seen(f"{P}committed_tokens_total") == len(client.outputs)
    assert seen(f"{P}rows_total", status="unknown_request") == 1
    assert seen(f"{P}rows_total", status="digest_mismatch") == 1
    assert seen(f"{P}opens_total", status="ok") == 1
    assert seen(f"{P}opens_total", status="stale_generation") == 1
    assert seen(f"{P}prefix_cache_queried_tokens_total") == 40, "of the one that was opened"
    assert seen(f"{P}invariant_violations_total") == 1, "the other digest"
    assert seen(f"{P}batch_rows_count") == 2, "a batch without a row that runs is none"


async def test_what_the_prefix_cache_was_asked_and_had(kit: Any, serve: Serve) -> None:
    async with serve() as (stream, scrape):
        gateway = stream()
        first, second = kit.client(PROMPT, SAMPLING), kit.client(PROMPT, SAMPLING)
        assert (await gateway.ask(first.open_request())).cached_tokens == 0
        await gateway.step(first.row())
        assert (await gateway.ask(second.open_request())).cached_tokens == 32
        seen = scrape()
    assert seen(f"{P}prefix_cache_queried_tokens_total") == 80
    assert seen(f"{P}prefix_cache_hit_tokens_total") == 32
    assert seen(f"{P}cached_blocks") == 2


async def test_steps_of_two_gateways_that_ran_together_are_one_batch(kit: Any, serve: Serve) -> None:
    """Which steps meet is up to time; whatever happens, rows and tokens of all batches are those sent."""
    async with serve() as (stream, scrape):
        clients = [kit.client(tuple(range(n, n + 20)), SAMPLING) for n in range(6)]

        async def gateway(client: Any) -> None:
            own = stream()
            await own.ask(client.open_request())
            while client.finish is None:
                client.take((await own.step(client.row()))[0])

        await asyncio.gather(*map(gateway, clients))
        seen = scrape()
    num_steps = 6 * 12
    assert seen(f"{P}steps_total") == seen(f"{P}queue_seconds_count") == num_steps
    assert seen(f"{P}batches_total") == seen(f"{P}batch_rows_count") <= num_steps
    assert seen(f"{P}batch_rows_sum") == num_steps
    assert seen(f"{P}batch_tokens_sum") == 6 * (20 + 11)
    assert seen(f"{P}committed_tokens_total") == num_steps


async def test_preempted_requests_are_counted(kit: Any, serve: Serve) -> None:
    async with serve(num_blocks=4, max_sequence_tokens=64) as (stream, scrape):
        gateway = stream()
        first, last = (kit.client(tuple(range(n, n + 40)), SAMPLING, arrival_us=n) for n in range(2))
        for client in (first, last):
            await gateway.ask(client.open_request())
        statuses = [row.status for row in await gateway.step(first.row(), last.row())]
        assert statuses == [Status.OK, Status.PREEMPTED]
        seen = scrape()
    assert seen(f"{P}preemptions_total") == 1
    assert seen(f"{P}rows_total", status="preempted") == 1


async def test_a_publisher_that_cannot_reach_the_registry_is_seen(serve: Serve) -> None:
    def new_publisher(description: VerifierDescription) -> Publisher:
        return Publisher(
            f"redis://127.0.0.1:{free_port()}",
            namespace=description.registry_namespace,
            address="v:1",
            incarnation=description.incarnation,
            ttl_seconds=5,
        )

    async with serve(new_publisher=new_publisher) as (stream, scrape):
        stream()
        while not (await asyncio.to_thread(scrape))(f"{P}registry_errors_total"):
            pass
        seen = await until(scrape, "streams", 1)
        assert seen(f"{P}registry_connected") == seen(f"{P}registry_registered") == 0
        unknown = [name for name in seen.without_samples if "registry" in name]
        assert not unknown, "counters that the publisher does not have"


def test_nothing_is_kept_of_what_was_answered(kit: Any) -> None:
    metrics, asked = Metrics(CollectorRegistry(), dict), Asked()
    client = kit.client(PROMPT, SAMPLING)
    for number in range(100):
        asked.add(client.open_request())
        asked.add(Step(number, (client.row(draft=[1, 2]),)))
        metrics.answered(asked, Opened(client.request_id, 1, Status.OK, 1, cached_tokens=16))
        metrics.answered(asked, step_done(number, row_done(client)))
        metrics.answered(asked, step_done(number, row_done(client)))  # twice: known no more
    assert not asked._num_tokens
    assert not asked._num_drafted


def row_done(client: Any) -> RowDone:
    return RowDone(client.request_id, 1, len(client.ids), Status.OK, 40, (5, 6), 1)


def step_done(step_id: int, *rows: RowDone) -> StepDone:
    return StepDone(step_id, tuple(rows), 1, 2, 3, 4, 5, len(rows), 60)


def test_the_page_says_exactly_what_there_is(kit: Any) -> None:
    registry = new_registry("verifier", restarts=0)
    metrics, asked = Metrics(registry, Everything), Asked()
    client = kit.client(PROMPT, SAMPLING)
    asked.add(Step(1, (client.row(draft=[1, 2]),)))
    metrics.answered(asked, step_done(1, row_done(client)))
    seen = read(registry)
    assert not seen.without_samples
    assert seen.described == documented("verifier")
