"""The drafter over a real gRPC server: what a gateway relies on, in order and out of order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest

from specsplit.core.codec import drafter as codec
from specsplit.core.digest import TokenDigest
from specsplit.core.types import WIRE_VERSION, CloseDraft, DraftBatch, DraftStatus, new_request_id
from specsplit.v1 import drafter_pb2

Sequencer = Callable[..., Any]


async def test_describe_names_the_proposer(client: Any) -> None:
    pb = await client.stub.Describe(drafter_pb2.DescribeDrafterRequest(), timeout=10)
    description = codec.description_from_pb(pb)
    assert (description.name, description.wire_version) == ("ngram", WIRE_VERSION)
    assert description.max_draft == 32
    assert len(description.incarnation) == 16


async def test_a_request_is_drafted_for_step_by_step(client: Any, sequence: Sequencer) -> None:
    stream = client.stream()
    request = sequence([1, 2, 3, 4, 5, 6, 7, 1, 2])
    first = (await stream.ask(request.row(3)))[0]
    assert (first.status, first.draft_ids, first.match_len) == (DraftStatus.OK, (3, 4, 5), 2)
    assert len(first.confidence) == 3
    request.ids += [3, 4, 9]
    assert (await stream.ask(request.row(3)))[0].draft_ids == ()
    request.ids += [1, 2, 3, 4]
    assert (await stream.ask(request.row(2)))[0].draft_ids == (9, 1)


async def test_a_row_that_wants_nothing_only_delivers_its_ids(client: Any, sequence: Sequencer) -> None:
    stream = client.stream()
    request = sequence([1, 2, 3, 1, 2])
    assert (await stream.ask(request.row(0)))[0].draft_ids == ()
    assert (await stream.ask(request.row(1)))[0].draft_ids == (3,)


async def test_rows_of_one_batch_keep_their_order_and_fail_alone(client: Any, sequence: Sequencer) -> None:
    stream = client.stream()
    good = [sequence([n, 1, 2, n, n, 1]) for n in range(10, 14)]
    unknown = sequence([1, 2, 3], told=2)
    rows = [good[0].row(2), unknown.row(), good[1].row(2), good[2].row(2), good[2].row(2), good[3].row(2)]
    answers = await stream.ask(*rows)
    assert [a.draft_ids for a in answers] == [(2, 10), (), (2, 11), (2, 12), (), (2, 13)]
    assert answers[1].status is DraftStatus.NEED_CONTEXT
    assert answers[4].status is DraftStatus.INVALID
    assert "request_id" in answers[4].detail
    stats = await client.stats()
    assert (stats["rows"], stats["need_context"], stats["invalid_rows"], stats["drafted"]) == (6, 1, 1, 8)


async def test_after_need_context_the_whole_sequence_goes_on(client: Any, sequence: Sequencer) -> None:
    stream = client.stream()
    request = sequence([1, 2, 3, 1])
    await stream.ask(request.row())
    request.ids.append(2)
    lied = (await stream.ask(request.row(digest=TokenDigest([9]).value)))[0]
    assert lied.status is DraftStatus.NEED_CONTEXT
    request.told = 0
    assert (await stream.ask(request.row(1)))[0].draft_ids == (3,)


async def test_close_frees_and_closing_twice_is_nothing(client: Any, sequence: Sequencer) -> None:
    stream = client.stream()
    request = sequence([1, 2, 3])
    await stream.ask(request.row())
    assert (await client.stats())["requests"] == 1
    for _ in range(2):
        await stream.send(CloseDraft(request.request_id))
    await stream.send(CloseDraft(new_request_id()))
    request.ids.append(4)
    assert (await stream.ask(request.row()))[0].status is DraftStatus.NEED_CONTEXT
    stats = await client.stats()
    assert (stats["requests"], stats["context_tokens"]) == (0, 0)


async def test_rows_evicted_by_their_own_batch_need_context(
    start_drafter: Callable[..., Awaitable[Any]], sequence: Sequencer
) -> None:
    client, _ = await start_drafter(max_context_tokens=20)
    rows = [sequence([n] * 9).row() for n in range(4)]
    answers = await client.stream().ask(*rows)
    wanted = [DraftStatus.NEED_CONTEXT] * 2 + [DraftStatus.OK] * 2
    assert [answer.status for answer in answers] == wanted
    assert (await client.stats())["context_tokens"] == 18


async def test_idle_requests_are_dropped_by_the_service(
    start_drafter: Callable[..., Awaitable[Any]], sequence: Sequencer
) -> None:
    client, _ = await start_drafter(idle_seconds=0.05)
    await client.stream().ask(sequence([1, 2, 3]).row())
    await client.stats_when(requests=0, context_tokens=0, streams=1)


@pytest.mark.parametrize("ending", ["finish", "cancel", "cancel before reading"])
async def test_a_stream_that_ends_leaves_nothing(client: Any, sequence: Sequencer, ending: str) -> None:
    kept = client.stream()
    await kept.ask(sequence([1, 2, 3]).row())
    stream = client.stream()
    await stream.ask(*[sequence([1, 2, 3]).row() for _ in range(5)])
    if ending == "finish":
        await stream.finish()
    else:
        if ending == "cancel before reading":
            await stream.send(DraftBatch(2, tuple(sequence([5] * 2000).row() for _ in range(50))))
        stream.call.cancel()
    stats = await client.stats_when(streams=1)
    assert (stats["requests"], stats["context_tokens"]) == (1, 3)


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (drafter_pb2.DraftCommand(), "command"),
        (drafter_pb2.DraftCommand(close=drafter_pb2.CloseDraft(request_id=b"short")), "request_id"),
        (
            drafter_pb2.DraftCommand(
                batch=drafter_pb2.DraftBatch(
                    rows=[drafter_pb2.DraftRow(request_id=b"r" * 16, base_len=1, new_ids=[1, 2])]
                )
            ),
            "new_ids",
        ),
        (
            drafter_pb2.DraftCommand(
                batch=drafter_pb2.DraftBatch(
                    rows=[drafter_pb2.DraftRow(request_id=b"r" * 16, base_len=1, new_ids=[1], max_draft=33)]
                )
            ),
            "max_draft",
        ),
    ],
)
async def test_a_malformed_command_ends_its_stream_and_names_the_field(
    client: Any, sequence: Sequencer, command: drafter_pb2.DraftCommand, field: str
) -> None:
    other, stream = client.stream(), client.stream()
    request = sequence([1, 2, 3, 1, 2])
    await other.ask(request.row())
    await stream.ask(sequence([1, 2]).row())
    await stream.call.write(command)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata() or ())["specsplit-field"] == field
    assert (await client.stats_when(streams=1))["requests"] == 1
    assert (await other.ask(request.row(1)))[0].draft_ids == (3,)


async def test_garbage_on_the_port_disturbs_nobody(
    start_drafter: Callable[..., Awaitable[Any]], sequence: Sequencer
) -> None:
    client, address = await start_drafter()
    stream = client.stream()
    request = sequence([1, 2, 3, 1, 2])
    await stream.ask(request.row())
    host, port = address.split(":")
    rng = random.Random(0)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for size in (1, 24, 1000, 100_000):
        for start in (b"", preface, b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            with suppress(OSError):  # the server may hang up while we are still sending
                writer.write(start + rng.randbytes(size))
                writer.write_eof()
                await reader.read()  # until the server closes
            writer.close()
    bad = grpc.aio.insecure_channel(address)  # a valid call whose message is no protobuf
    call = bad.stream_stream("/specsplit.v1.Drafter/Run")()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await bad.close()
    assert (await stream.ask(request.row(1)))[0].draft_ids == (3,)
    assert (await client.stats_when(streams=1))["requests"] == 1


async def test_eight_streams_with_eight_requests_each_do_not_mix(client: Any, sequence: Sequencer) -> None:
    """Every request has its own period, known by its drafts; ids and rows of all streams interleave."""
    shared_ids = [new_request_id() for _ in range(8)]  # the same ids on every stream, on purpose

    async def gateway(number: int) -> None:
        rng = random.Random(number)
        stream = client.stream()
        periods = [[1000 * number + 10 * r + i for i in range(2 + r)] for r in range(8)]
        requests = [sequence(period * 2, request_id=shared_ids[r]) for r, period in enumerate(periods)]
        for _ in range(30):
            chosen = rng.sample(range(8), rng.randint(1, 8))
            grants = [rng.randint(1, 8) for _ in chosen]
            rows = [requests[r].row(k) for r, k in zip(chosen, grants, strict=True)]
            for r, k, answer in zip(chosen, grants, await stream.ask(*rows), strict=True):
                period, length = periods[r], len(requests[r].ids)
                assert answer.draft_ids == tuple(period[(length + i) % len(period)] for i in range(k))
                requests[r].ids += answer.draft_ids[: rng.randint(0, k)]
        await stream.finish()

    await asyncio.gather(*(gateway(number) for number in range(8)))
    stats = await client.stats_when(streams=0)
    assert (stats["requests"], stats["context_tokens"], stats["need_context"]) == (0, 0, 0)


async def test_commands_in_random_order_are_answered_or_refused_never_wrong(
    client: Any, sequence: Sequencer
) -> None:
    """Closes, gaps, wrong digests, old generations: a draft that does come continues the true sequence."""
    rng = random.Random(7)
    stream = client.stream()
    requests = [sequence(list(range(10 * n, 10 * n + 5)) * 2) for n in range(6)]
    statuses = set()
    for _ in range(2000):
        request = rng.choice(requests)
        match rng.randrange(7):
            case 0:
                await stream.send(CloseDraft(request.request_id))
                continue
            case 1:
                request.told = rng.randint(0, len(request.ids))
            case 2:
                request.told = 0
            case 3:
                request.generation += rng.choice((-1, 1)) if request.generation > 1 else 1
        changes = {"digest": rng.getrandbits(64)} if rng.randrange(10) == 0 else {}
        answer = (await stream.ask(request.row(4, **changes)))[0]
        statuses.add(answer.status)
        if answer.status is DraftStatus.OK:
            base = request.ids[0]
            period = [base + (len(request.ids) + i) % 5 for i in range(4)]
            assert answer.draft_ids == tuple(period)
            request.ids += period[: rng.randint(0, 2)]
    assert statuses == set(DraftStatus)
    assert (await client.stats())["requests"] <= len(requests)


async def test_ten_thousand_short_requests_leave_the_tables_at_baseline(
    client: Any, sequence: Sequencer
) -> None:
    stream = client.stream()
    await stream.ask(sequence([1, 2]).row(0))
    baseline = await client.stats()
    for _ in range(250):
        requests = [sequence([1, 2, 3, 1, 2]) for _ in range(40)]
        await stream.ask(*[request.row() for request in requests])
        for request in requests:
            await stream.send(CloseDraft(request.request_id))
    levels = ("requests", "streams", "context_tokens", "open_fds")
    await client.stats_when(**{level: baseline[level] for level in levels})
    assert (await client.stats())["rows"] == baseline["rows"] + 10_000
