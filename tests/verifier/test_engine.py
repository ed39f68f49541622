"""The core over the real engine (tiny Llama, paged KV, real kernels), and the process that serves it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys

import specsplit.engine.threads  # noqa: F401  before torch

import pytest  # isort: skip
import torch
from metrics_check import scrape
from transformers import LlamaConfig, LlamaForCausalLM

from specsplit.core.codec import verifier
from specsplit.core.serving import open_channel
from specsplit.core.types import Opened, SamplingParams, Step, StepDone
from specsplit.engine.model import load_model
from specsplit.v1 import verifier_pb2_grpc
from specsplit.verifier.core import VerifierCore
from specsplit.verifier.loading import load
from specsplit.verifier.main import main
from specsplit.verifier.settings import VerifierSettings

MAX_MARGIN = 1e-3  # a choice nearer than this may flip by rounding


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.4, eos_token_id=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def make_core(kit, folder, monkeypatch):
    monkeypatch.setenv("SPECSPLIT_POISON", "1")
    model = load_model(str(folder), dtype="float32", device="cpu", num_threads=1)

    def make(**changes):
        limits = kit.limits(vocab_size=64, **changes)
        model.allocate_kv(limits.num_blocks)
        return VerifierCore(model, limits, eos_token_ids=model.info.eos_token_ids, namespace=b"test-ns!")

    return make


def assert_same(client, expected) -> None:
    """Equal texts, or a first difference at a choice that rounding may flip; then the rest says nothing."""
    for index, (got, want) in enumerate(zip(client.outputs, expected.outputs, strict=False)):
        if got != want:
            assert min(client.margins[index], expected.margins[index]) < MAX_MARGIN, index
            return
    assert (client.outputs, client.finish) == (expected.outputs, expected.finish)


@pytest.mark.parametrize("num_blocks", [64, 9], ids=["ample", "scarce"])
def test_texts_on_a_real_model(kit, make_core, num_blocks) -> None:
    """Mixed sampling, drafts, chunks, shuffled batches, shared prefixes and preemption: each as if alone."""
    rng = random.Random(num_blocks)
    clients = []
    for index in range(12):
        sampling = SamplingParams(
            max_tokens=rng.randint(5, 50), seed=index, temperature=(0.0, 0.8, 1.2)[index % 3], top_k=30,
            top_p=0.95, min_p=0.01, min_tokens=index % 2 * 5, report_margins=True,
        )  # fmt: skip
        prompt = (*range(3, 3 + 18 * (index % 2)), *(rng.randrange(3, 64) for _ in range(rng.randint(1, 30))))
        clients.append(kit.client(tuple(prompt), sampling, arrival_us=index))
    expected = {}
    for client in clients:
        harness = kit.harness(make_core(num_blocks=num_blocks, max_sequence_tokens=128))
        alone = kit.client(client.prompt, client.sampling)
        harness.finish([harness.open(alone)])
        expected[client.request_id] = alone

    def draft(client):
        known = expected[client.request_id].outputs[len(client.outputs) :][: rng.randint(0, 5)]
        return [(id_ + (rng.random() < 0.2)) % 64 for id_ in known]

    core = make_core(num_blocks=num_blocks, max_sequence_tokens=128)
    harness = kit.harness(core)
    for client in clients:
        harness.open(client)
    harness.finish(clients, draft, rng=rng, max_chunk=20, max_rows=7)
    for client in clients:
        assert_same(client, expected[client.request_id])
    assert sum(client.accepted for client in clients) > 50
    assert (core.counts["preemptions"] > 0) == (num_blocks == 9)
    assert core.pool.num_free == num_blocks


def test_loading_sizes_the_pool(folder) -> None:
    loaded = load(VerifierSettings.model_construct(model=str(folder), num_blocks=10, device="cpu", threads=1))
    description = loaded.description
    assert (description.num_blocks, description.max_sequence_tokens) == (10, 160)
    assert (description.vocab_size, description.eos_token_ids) == (64, (2,))
    assert (description.dtype, description.numerics) == ("float32", "cpu-paged-v1")
    assert len(description.registry_namespace) == 8
    with pytest.raises(Exception, match="max_sequence_tokens"):
        load(
            VerifierSettings.model_construct(
                model=str(folder), num_blocks=2, max_sequence_tokens=33, threads=1
            )
        )


async def until_logged(process, text: str) -> None:
    async with asyncio.timeout(120):
        while text not in (line := (await process.stderr.readline()).decode()):
            assert line, f"ended before it logged {text!r}"


async def test_the_process_serves_drains_and_stops(kit, folder, tmp_path) -> None:
    announce = tmp_path / "announce.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specsplit.cli", "verifier", "--model", str(folder), "--num-blocks", "16",
        "--port", "0", "--metrics-port", "0", "--announce", str(announce), stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    await until_logged(process, "ready at")
    async with open_channel(json.loads(announce.read_text())["addresses"]["grpc"]) as channel:
        call = verifier_pb2_grpc.VerifierStub(channel).Run()
        client = kit.client(tuple(range(3, 40)), SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
        await call.write(verifier.command_to_pb(client.open_request()))

        async def answer(kind):
            while not isinstance(event := verifier.event_from_pb(await call.read()), kind):
                pass
            return event

        await answer(Opened)
        process.send_signal(signal.SIGTERM)
        await until_logged(process, "draining")
        for number in range(8):
            await call.write(verifier.command_to_pb(Step(number, (client.row(),))))
            client.take((await answer(StepDone)).rows[0])
        assert client.finish is not None
        seen = await asyncio.to_thread(scrape, json.loads(announce.read_text())["addresses"]["metrics"])
        assert seen("specsplit_verifier_committed_tokens_total") == 8
        assert seen("specsplit_verifier_draining") == 1
        await call.write(verifier.command_to_pb(client.close_request()))
        assert await asyncio.wait_for(process.wait(), 30) == 0


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--num-blocks", "0"), 2, "num_blocks"),
        (("--port", "0", "--metrics-port", "0", "--model", "/no/such/folder"), 1, "/no/such/folder"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(flags, status, message, capsys, caplog) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specsplit verifier: error: ")
    assert message in line
    assert caught.value.code == status
    assert "Traceback" not in caplog.text
