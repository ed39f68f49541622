"""A service process with nothing to serve: it listens, announces, becomes ready and drains.

python fake_service.py NAME --port N --announce FILE --restarts N [--exit STATUS] [--ignore-sigterm]
    [--helper FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from specsplit.core.serving import GrpcService, ListenSettings


async def serve(options: argparse.Namespace) -> None:
    service = GrpcService(options.name, ListenSettings(port=options.port, announce=options.announce))

    async def start() -> None:
        if options.ignore_sigterm:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print, "not now")

    async def nothing() -> None:
        pass

    await service.run(start=start, drain=nothing, close=nothing)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--announce", type=Path, required=True)
    parser.add_argument("--restarts", type=int, required=True)
    parser.add_argument("--exit", type=int)
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--helper", type=Path)
    options = parser.parse_args()
    if options.exit is not None:
        print("cannot start: the reason", file=sys.stderr)
        raise SystemExit(options.exit)
    if options.helper is not None:
        helper = subprocess.Popen(["sleep", "600"])
        options.helper.write_text(str(helper.pid))
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
