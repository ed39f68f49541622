"""The service over real gRPC: who may do what, what a broken stream leaves (nothing), how it drains."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import grpc
import pytest

from specsplit.core.codec import common, verifier
from specsplit.core.serving import GrpcService, ListenSettings, open_channel
from specsplit.core.types import (
    Capacity,
    FinishReason,
    Opened,
    Preempted,
    SamplingParams,
    Status,
    Step,
    StepDone,
    VerifierDescription,
)
from specsplit.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from specsplit.verifier.device import Loaded
from specsplit.verifier.service import VerifierService

SAMPLING = SamplingParams(max_tokens=12, seed=3, temperature=0.8, top_p=0.9, ignore_eos=True)
PROMPT = tuple(range(20))


async def read_to_end(call) -> None:
    while await asyncio.wait_for(call.read(), 30) is not grpc.aio.EOF:
        pass


class Stream:
    """One Run stream as a gateway holds it; events in the order they came."""

    def __init__(self, channel) -> None:
        self.call = verifier_pb2_grpc.VerifierStub(channel).Run()
        self.num_steps = 0

    async def send(self, command) -> None:
        await self.call.write(verifier.command_to_pb(command))

    async def next(self, kind=None):
        """The next event, or the next one of that kind."""
        while True:
            pb = await asyncio.wait_for(self.call.read(), 30)
            if pb is grpc.aio.EOF:
                return None
            event = verifier.event_from_pb(pb)
            if kind is None or isinstance(event, kind):
                return event

    async def open(self, client):
        await self.send(client.open_request())
        opened = await self.next(Opened)
        assert (opened.request_id, opened.generation) == (client.request_id, client.generation)
        client.num_computed = client.num_cached = opened.cached_tokens
        return opened

    async def send_step(self, rows) -> int:
        self.num_steps += 1
        await self.send(Step(self.num_steps, tuple(rows)))
        return self.num_steps

    async def step(self, rows):
        number = await self.send_step(rows)
        done = await self.next(StepDone)
        assert done.step_id == number
        return done

    async def finish(self, clients) -> None:
        running = list(clients)
        while running:
            done = await self.step([client.row() for client in running])
            for client, row in zip(list(running), done.rows, strict=True):
                client.take(row)
                if client.finish:
                    running.remove(client)
                    await self.send(client.close_request())

    async def error(self) -> grpc.aio.AioRpcError:
        """The status that ends the call."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(self.call)
        return caught.value


class Server:
    def __init__(self, service, core, model, channel) -> None:
        self.service, self.core, self.model, self.channel = service, core, model, channel
        self.stub = verifier_pb2_grpc.VerifierStub(channel)

    def stream(self) -> Stream:
        return Stream(self.channel)

    async def stats(self) -> dict[str, int]:
        return common.stats_from_pb(await self.stub.Stats(common_pb2.StatsRequest(), timeout=10))

    async def settled(self, **expected: int) -> None:
        """Asks until the counters are as expected; the test's own timeout ends a wait in vain."""
        async with asyncio.timeout(30):
            while not expected.items() <= (await self.stats()).items():
                pass


def describe(core) -> VerifierDescription:
    limits = core.limits
    return VerifierDescription(
        model="scripted", revision="", dtype="float32", numerics="test", tokenizer_digest="",
        vocab_size=limits.vocab_size, max_sequence_tokens=limits.max_sequence_tokens, block_size=16,
        num_blocks=limits.num_blocks, max_step_tokens=limits.max_step_tokens,
        max_step_rows=limits.max_step_rows, incarnation=bytes(16), registry_namespace=bytes(8),
        eos_token_ids=(7,),
    )  # fmt: skip


@pytest.fixture
def serve(kit):
    @asynccontextmanager
    async def running(**changes):
        core, model = kit.core(**changes)
        service = VerifierService(
            lambda: Loaded(core, describe(core)), max_steps_in_flight=2, on_failure=lambda: None
        )
        server = GrpcService("specsplit.v1.Verifier", ListenSettings())
        verifier_pb2_grpc.add_VerifierServicer_to_server(service, server.server)
        port = server.server.add_insecure_port("127.0.0.1:0")
        await server.server.start()
        await service.start()
        channel = open_channel(f"127.0.0.1:{port}")
        try:
            yield Server(service, core, model, channel)
        finally:
            await channel.close()
            await service.close()
            await server.server.stop(None)

    return running


async def test_describe_waits_for_the_model_and_a_request_runs(kit, alone) -> None:
    core, _ = kit.core()
    is_loaded = threading.Event()

    def load() -> Loaded:
        is_loaded.wait()
        return Loaded(core, describe(core))

    service = VerifierService(load, max_steps_in_flight=2, on_failure=lambda: None)
    server = grpc.aio.server()
    verifier_pb2_grpc.add_VerifierServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    starting = asyncio.ensure_future(service.start())
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        for call in (stub.Describe(verifier_pb2.DescribeVerifierRequest()), stub.Run().read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        is_loaded.set()
        await starting
        pb = await stub.Describe(verifier_pb2.DescribeVerifierRequest())
        assert verifier.description_from_pb(pb) == describe(core)
        stream = Stream(channel)
        assert await stream.next() == Capacity(max_steps_in_flight=2, free_blocks=64)
        client = kit.client(PROMPT, SAMPLING)
        assert (await stream.open(client)).status is Status.OK
        await stream.finish([client])
        assert client.outputs == alone(client).outputs
        await stream.call.done_writing()
        assert await stream.next() is None
    await service.close()
    await server.stop(None)


async def test_a_loader_that_fails_fails_the_start(kit) -> None:
    def load() -> Loaded:
        raise MemoryError("no room")

    service = VerifierService(load, max_steps_in_flight=2, on_failure=lambda: None)
    with pytest.raises(MemoryError):
        await service.start()
    await service.close()


async def test_streams_do_not_touch_each_others_requests(kit, serve, alone) -> None:
    async with serve() as server:
        mine, other = server.stream(), server.stream()
        client = kit.client(PROMPT, SAMPLING)
        await mine.open(client)
        assert (await other.open(client)).status is Status.NOT_OWNER
        done = await other.step([client.row()])
        assert [row.status for row in done.rows] == [Status.NOT_OWNER]
        await other.send(client.close_request())
        await other.call.done_writing()
        assert await other.next(Opened) is None
        await mine.finish([client])
        assert client.outputs == alone(client).outputs


@pytest.mark.parametrize("when", ["open", "between", "during"])
async def test_a_broken_stream_leaves_nothing_behind(kit, serve, when) -> None:
    """Case 19: the client goes after Open, between steps, or while its step is on the device."""
    async with serve() as server:
        stream = server.stream()
        clients = [kit.client((index, *PROMPT), SAMPLING) for index in range(5)]
        for client in clients:
            await stream.open(client)
        if when != "open":
            await stream.step([client.row(chunk=7) for client in clients])
        if when == "during":
            is_running, may_end = threading.Event(), threading.Event()
            server.model.before_step = lambda: (is_running.set(), may_end.wait())
            for client in clients:
                client.num_computed = 7
            await stream.send_step([client.row() for client in clients])
            await asyncio.to_thread(is_running.wait)
            stream.call.cancel()
            may_end.set()
        stream.call.cancel()
        await server.settled(streams=0, open_requests=0, free_blocks=64)
        assert not server.service._streams
        assert not server.core.sequences


async def test_all_that_was_sent_is_answered_before_a_stream_ends(kit, serve) -> None:
    async with serve() as server:
        stream = server.stream()
        client = kit.client(PROMPT, SAMPLING)
        await stream.send(client.open_request())
        await stream.send_step([client.row()])
        await stream.call.done_writing()
        events = []
        while (event := await stream.next()) is not None:
            events.append(event)
        assert [type(event) for event in events] == [Capacity, Opened, StepDone]
        await server.settled(streams=0, open_requests=0, free_blocks=64)


async def test_too_many_steps_in_flight_end_the_stream(kit, serve) -> None:
    async with serve() as server:
        stream, other = server.stream(), server.stream()
        is_running, may_end = threading.Event(), threading.Event()
        client = kit.client(PROMPT, SAMPLING)
        await stream.open(client)
        server.model.before_step = lambda: (is_running.set(), may_end.wait())
        await stream.send_step([client.row()])
        await asyncio.to_thread(is_running.wait)
        for _ in range(2):
            await stream.send_step([])
        error = await stream.error()
        may_end.set()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_steps_in_flight" in error.details()
        assert dict(error.trailing_metadata())["specsplit-field"] == "max_steps_in_flight"
        assert (await other.next()).max_steps_in_flight == 2
        await server.settled(streams=1, open_requests=0)


async def test_wrong_and_garbled_commands_end_their_stream_only(kit, serve, alone) -> None:
    async with serve() as server:
        bystander = server.stream()
        client = kit.client(PROMPT, SAMPLING)
        await bystander.open(client)
        raw = server.channel.stream_stream("/specsplit.v1.Verifier/Run")
        empty = verifier_pb2.VerifierCommand().SerializeToString()
        short_id = verifier_pb2.VerifierCommand(
            close=verifier_pb2.CloseRequest(request_id=b"short", generation=1)
        ).SerializeToString()
        for message, field in (
            (empty, "command"),
            (short_id, "request_id"),
            (b"\xff garbage \xff", "command"),
        ):
            call = raw()
            await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_end(call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, message
            assert dict(caught.value.trailing_metadata())["specsplit-field"] == field
        await server.settled(streams=1, open_requests=1)
        await bystander.finish([client])
        assert client.outputs == alone(client).outputs


async def test_two_gateways_share_the_batches(kit, serve, alone) -> None:
    """Steps of two streams that wait together run together, and nobody's text knows."""
    async with serve() as server:
        streams = [server.stream(), server.stream()]
        clients = [[kit.client((index, side), SAMPLING) for index in range(4)] for side in range(2)]
        for stream, mine in zip(streams, clients, strict=True):
            for client in mine:
                await stream.open(client)
        is_running, may_end = threading.Event(), threading.Event()
        server.model.before_step = lambda: (is_running.set(), may_end.wait())
        blocker = server.stream()
        extra = kit.client(PROMPT, SAMPLING)
        await blocker.open(extra)
        await blocker.send_step([extra.row()])
        await asyncio.to_thread(is_running.wait)
        for stream, mine in zip(streams, clients, strict=True):
            await stream.send_step([client.row() for client in mine])
        while server.service._device._inbox.qsize() < 2:  # both have reached the device's inbox
            await server.stats()
        may_end.set()
        for stream, mine in zip(streams, clients, strict=True):
            done = await stream.next(StepDone)
            assert (done.batch_rows, done.batch_tokens) == (8, 16)
            for client, row in zip(mine, done.rows, strict=True):
                client.take(row)
        await asyncio.gather(*(s.finish(mine) for s, mine in zip(streams, clients, strict=True)))
        for client in [*clients[0], *clients[1]]:
            assert client.outputs == alone(client).outputs


async def test_others_hear_of_free_blocks_and_owners_of_preemption(kit, serve) -> None:
    async with serve(num_blocks=2, max_sequence_tokens=32) as server:
        late, early = server.stream(), server.stream()
        assert (await late.next()).free_blocks == 2
        assert (await early.next()).free_blocks == 2
        loser = kit.client(PROMPT, SAMPLING, priority=1)
        await late.open(loser)
        assert (await late.step([loser.row()])).free_blocks == 0
        assert await early.next() == Capacity(2, free_blocks=0)
        winner = kit.client((1, 2), SAMPLING)
        await early.open(winner)
        done = await early.step([winner.row()])
        assert [row.status for row in done.rows] == [Status.OK]
        preempted = await late.next(Preempted)
        assert preempted.request_id == loser.request_id
        await early.send(winner.close_request())
        while (await late.next(Capacity)).free_blocks != 2:
            pass


async def test_a_drain_opens_nothing_and_waits_for_the_last_request(kit, serve, alone) -> None:
    async with serve() as server:
        stream = server.stream()
        client = kit.client(PROMPT, SAMPLING)
        await stream.open(client)
        draining = asyncio.ensure_future(server.service.drain())
        await server.settled(is_draining=1)
        assert (await stream.open(kit.client(PROMPT, SAMPLING))).status is Status.DRAINING
        assert not draining.done()
        await stream.finish([client])
        await asyncio.wait_for(draining, 30)
        assert client.outputs == alone(client).outputs
        assert client.finish is FinishReason.LENGTH


async def test_a_failure_of_the_core_ends_the_service_loudly(kit, serve, caplog) -> None:
    async with serve() as server:
        stream = server.stream()
        client = kit.client(PROMPT, SAMPLING)
        await stream.open(client)
        server.core.sequences[client.request_id].block_table.append(99)  # a block that it does not hold
        await stream.send_step([client.row()])
        assert (await stream.error()).code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(server.service.failure, IndexError | AssertionError)
        assert (await server.stats())["invariant_violations"] == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Describe(verifier_pb2.DescribeVerifierRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await server.service.drain()


async def test_many_short_requests_leave_the_counters_where_they_were(kit, serve) -> None:
    async with serve() as server:
        watcher = server.stream()
        await watcher.next()
        baseline = await server.stats()
        sampling = SamplingParams(max_tokens=2, seed=1, temperature=0.0, ignore_eos=True)
        for _ in range(10):
            stream = server.stream()
            for _ in range(5):
                clients = [kit.client((*PROMPT, index), sampling) for index in range(10)]
                for client in clients:
                    await stream.open(client)
                await stream.finish(clients)
            stream.call.cancel()
        await server.settled(streams=1, open_requests=0)
        stats = await server.stats()
        for name in ("open_requests", "streams", "free_blocks", "total_blocks", "open_fds"):
            assert stats[name] == baseline[name], name
        assert stats["steps"] == stats["batches"] == 100
        assert stats["opens_ok"] == 500
        assert stats["rows_ok"] == 1000
        assert stats["invariant_violations"] == stats["step_failures"] == 0
