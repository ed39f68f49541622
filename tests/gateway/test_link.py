"""The gateway's stream to a service, against a peer that keeps ending it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from specsplit.core.codec import drafter as codec
from specsplit.core.errors import Unavailable
from specsplit.core.serving import abort
from specsplit.core.types import DrafterDescription, new_incarnation
from specsplit.gateway.link import Link
from specsplit.gateway.wires import DrafterWire
from specsplit.v1 import drafter_pb2_grpc


class EndingDrafter(drafter_pb2_grpc.DrafterServicer):
    async def Describe(self, request: Any, context: Any) -> Any:
        return codec.description_to_pb(DrafterDescription("ending", 4, "", new_incarnation()))

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        await abort(context, Unavailable("ended"))
        yield


async def test_streams_that_the_peer_ended_leave_no_task() -> None:
    server = grpc.aio.server()
    drafter_pb2_grpc.add_DrafterServicer_to_server(EndingDrafter(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    downs: asyncio.Queue[None] = asyncio.Queue()
    link = Link(
        "drafter",
        f"127.0.0.1:{port}",
        DrafterWire(),
        accept=lambda _: None,
        on_event=lambda _: None,
        on_down=lambda: downs.put_nowait(None),
    )
    running = asyncio.create_task(link.run())
    try:
        for _ in range(4):
            await asyncio.wait_for(downs.get(), 20)
        readers = [
            task
            for task in asyncio.all_tasks()
            if getattr(task.get_coro(), "__name__", "") == "_consume_request_iterator"
        ]
        assert len(readers) <= 1  # of the stream that ended last
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(grace=None)
