"""The drafter's metrics: what it answered, as it answered it, and /metrics of the process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from metrics_check import documented, read, scrape
from prometheus_client import CollectorRegistry

from specsplit.core.metrics import new_registry
from specsplit.drafter.ngram import NgramProposer
from specsplit.drafter.service import DrafterService

P = "specsplit_drafter_"
Sequencer = Callable[..., Any]


async def test_batches_rows_and_matches(
    start_drafter: Callable[..., Awaitable[Any]], sequence: Sequencer
) -> None:
    registry = new_registry("drafter", restarts=2)
    client, _ = await start_drafter(metrics=registry)
    stream = client.stream()
    request = sequence([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    await stream.ask(request.row(3), sequence([1, 2, 3], told=2).row())  # matches 3; needs context
    request.ids += [9]
    await stream.ask(request.row(4))  # matches nothing
    request.ids += [1, 2]
    await stream.ask(request.row(0))  # wants nothing
    seen = read(registry)
    assert (seen(f"{P}batches_total"), seen(f"{P}rows_total")) == (3, 4)
    assert (seen(f"{P}need_context_rows_total"), seen(f"{P}invalid_rows_total")) == (1, 0)
    assert seen(f"{P}drafted_tokens_total") == seen(f"{P}draft_tokens_sum") == 3
    assert [seen(f"{P}match_tokens_bucket", le=le) for le in ("0.0", "2.0", "3.0", "+Inf")] == [1, 1, 2, 2]
    assert (seen(f"{P}draft_seconds_count"), seen(f"{P}batch_rows_sum")) == (3, 4)
    assert 0 < seen(f"{P}draft_seconds_sum") < 60
    assert (seen(f"{P}streams"), seen(f"{P}requests"), seen(f"{P}context_tokens")) == (1, 1, 13)
    assert seen(f"{P}invariant_violations_total") == 0
    assert seen(f"{P}restarts_total") == 2
    await stream.finish()
    await client.stats_when(streams=0)
    assert (read(registry)(f"{P}requests"), read(registry)(f"{P}context_tokens")) == (0, 0)


async def test_a_proposer_that_breaks_its_promise_is_counted(
    start_drafter: Callable[..., Awaitable[Any]], sequence: Sequencer, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    client, _ = await start_drafter(metrics=registry)
    drafts = NgramProposer.propose
    monkeypatch.setattr(
        NgramProposer,
        "propose",
        lambda self, asks: [type(draft)(draft.ids * 2) for draft in drafts(self, asks)],
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await client.stream().ask(sequence([1, 2, 3, 1, 2]).row(1))
    await client.stats_when(streams=0)
    assert read(registry)(f"{P}invariant_violations_total") == 1


def test_the_page_says_exactly_what_there_is() -> None:
    registry = new_registry("drafter", restarts=0)
    DrafterService(NgramProposer(min_n=2, max_n=5), max_context_tokens=1, idle_seconds=1, metrics=registry)
    seen = read(registry)
    assert not seen.without_samples
    assert seen.described == documented("drafter")


def test_the_process_serves_its_metrics_until_it_ends(tmp_path: Path) -> None:
    announce = tmp_path / "drafter.json"
    code = "import sys; from specsplit.drafter.main import main; main(sys.argv[1:])"
    flags = ("--port", "0", "--metrics-port", "0", "--restarts", "4", "--announce", str(announce))
    with subprocess.Popen([sys.executable, "-c", code, *flags]) as process:
        try:
            while not announce.exists():
                assert process.poll() is None, "ended before it listened"
                time.sleep(0.01)
            address = json.loads(announce.read_text())["addresses"]["metrics"]
            assert scrape(address)(f"{P}restarts_total") == 4
            taken = ("--port", "0", "--metrics-port", address.split(":")[1])
            second = subprocess.run(
                [sys.executable, "-c", code, *taken], capture_output=True, text=True, check=False
            )
            assert second.returncode == 1
            assert second.stderr.startswith("specsplit drafter: error: metrics_port: cannot listen on")
            assert "Traceback" not in second.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()
