"""A service whose start and drain end when its standard input says so; its output says what happened."""

from __future__ import annotations

import asyncio
import sys

from pydantic_settings import SettingsConfigDict

from specsplit.core.serving import GrpcService, ListenSettings
from specsplit.core.settings import load_settings


class ExampleSettings(ListenSettings):
    model_config = SettingsConfigDict(env_prefix="SPECSPLIT_EXAMPLE_")


async def serve(settings: ExampleSettings) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    process = GrpcService("example", settings)

    async def start() -> None:
        print("starting", flush=True)
        if await lines.readline() == b"fail\n":
            raise RuntimeError("no model")
        process.addresses["http"] = "127.0.0.1:1"

    async def drain() -> None:
        print("draining", flush=True)
        await lines.readline()

    async def close() -> None:
        print("closed", flush=True)

    await process.run(start=start, drain=drain, close=close)


if __name__ == "__main__":
    asyncio.run(serve(load_settings(ExampleSettings, sys.argv[1:], prog="example")))
