"""What a client relies on: the text depends on prompt, parameters and seed alone, and ends in its place."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specsplit.core.types import FinishReason, SamplingParams
from specsplit.kernels.coupled import CoupledRows, coupled_verify_reference

PROMPT = tuple(range(10, 33))
SAMPLINGS = [
    SamplingParams(max_tokens=40, seed=0, temperature=0.0),
    SamplingParams(max_tokens=40, seed=5, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(max_tokens=40, seed=2**64 - 1, temperature=0.8, top_p=0.8),
    SamplingParams(max_tokens=40, seed=9, temperature=1.5, min_p=0.1, ignore_eos=True),
    SamplingParams(max_tokens=40, seed=3, temperature=1.0, top_k=5, min_tokens=25),
]


def oracle(kit, prompt, sampling):
    """Position by position from the definition, with the reference sampler and no verifier at all."""
    stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {kit.eos})
    outputs = []
    while len(outputs) < sampling.max_tokens:
        logits = kit.logits([*prompt, *outputs])
        if len(outputs) < sampling.min_tokens:
            logits[list(stop)] = -math.inf
        one = lambda value, dtype: torch.tensor([value], dtype=dtype)  # noqa: E731
        token = coupled_verify_reference(
            logits[None],
            CoupledRows(
                offsets=torch.tensor([0, 1]),
                draft_ids=torch.tensor([0]),
                temperature=one(sampling.temperature, torch.float64),
                top_k=one(sampling.top_k, torch.int64),
                top_p=one(sampling.top_p, torch.float64),
                min_p=one(sampling.min_p, torch.float64),
                seed=one(sampling.seed, torch.uint64),
                position=one(len(outputs), torch.int64),
            ),
        ).tokens.item()
        outputs.append(token)
        if token in stop:
            return outputs, FinishReason.STOP
    return outputs, FinishReason.LENGTH


def scripted(text, rng, kind):
    """Drafts that know the text: right, wrong, or right up to a random place."""

    def draft(client):
        k = rng.randint(0, 6)
        known = text[client.request_id][len(client.outputs) :][:k]
        if kind == "right":
            return known
        at = 0 if kind == "wrong" else rng.randint(0, len(known))
        return [(id_ + (index >= at)) % 48 for index, id_ in enumerate(known)]

    return draft


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_alone_and_undrafted_it_is_the_definition(kit, alone, sampling) -> None:
    client = alone(kit.client(PROMPT, sampling))
    assert (client.outputs, client.finish) == oracle(kit, PROMPT, sampling)


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
def test_drafts_batches_chunks_and_order_never_change_a_text(kit, alone, kind) -> None:
    rng = random.Random(kind)
    core, _ = kit.core()
    harness = kit.harness(core)
    clients = [kit.client(PROMPT[: rng.randint(1, 23)], sampling) for sampling in SAMPLINGS for _ in range(3)]
    expected = {client.request_id: alone(client) for client in clients}
    text = {id_: client.outputs for id_, client in expected.items()}
    for client in clients:
        harness.open(client)
    harness.finish(clients, scripted(text, rng, kind), rng=rng, max_chunk=9, max_rows=6)
    for client in clients:
        assert client.outputs == text[client.request_id]
        assert client.finish == expected[client.request_id].finish
    if kind == "right":
        assert sum(client.accepted for client in clients) > 200
    if kind == "wrong":
        assert all(client.accepted == 0 for client in clients)
    assert core.pool.num_free == core.pool.num_blocks


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_inside_a_full_run(kit, alone, max_tokens) -> None:
    """Case 4: from 1 to k + 2 with k = 6 and full acceptance, exactly that many."""
    sampling = SamplingParams(max_tokens=20, seed=1, temperature=0.0, ignore_eos=True)
    text = alone(kit.client(PROMPT, sampling)).outputs
    core, _ = kit.core()
    harness = kit.harness(core)
    client = kit.client(
        PROMPT, SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True)
    )
    harness.open(client)
    (done,) = harness.step_rows([client.row(text[:6])])
    client.take(done)
    assert client.outputs == text[: min(max_tokens, 7)]
    assert done.num_accepted == min(max_tokens, 6)
    assert client.finish == (FinishReason.LENGTH if max_tokens <= 7 else None)
    if client.finish is None:
        harness.finish([client])
    assert client.outputs == text[:max_tokens]


def test_a_stop_id_inside_a_run_ends_it_there(kit, alone) -> None:
    """Case 3 at the level of ids: stop before the limit, the limit before stop, both at once is a stop."""
    free = SamplingParams(max_tokens=12, seed=4, temperature=0.9, ignore_eos=True)
    text = alone(kit.client(PROMPT, free)).outputs
    stop = next(id_ for index, id_ in enumerate(text[2:6], 2) if id_ not in text[:index])
    at = text.index(stop)
    for max_tokens, length, reason in (
        (at + 3, at + 1, FinishReason.STOP),
        (at + 1, at + 1, FinishReason.STOP),
        (at, at, FinishReason.LENGTH),
    ):
        core, _ = kit.core()
        harness = kit.harness(core)
        sampling = SamplingParams(
            max_tokens=max_tokens, seed=4, temperature=0.9, ignore_eos=True, stop_token_ids=(stop,),
            num_logprobs=1, report_margins=True,
        )  # fmt: skip
        client = harness.open(kit.client(PROMPT, sampling))
        (done,) = harness.step_rows([client.row(text[:8])])
        client.take(done)
        assert (client.outputs, client.finish) == (text[:length], reason)
        assert len(done.logprobs) == len(done.margins) == done.num_accepted == length
        assert core.pool.num_free == core.pool.num_blocks  # an ended request holds no memory


def test_min_tokens_reached_inside_a_run(kit, alone) -> None:
    """Case 5: no end before, none forbidden after, the same with and without drafts."""
    ended = 0
    for seed in range(30):
        sampling = SamplingParams(
            max_tokens=30, seed=seed, temperature=1.3, min_tokens=8, stop_token_ids=(1, 2, 3, 4)
        )
        client = kit.client(PROMPT, sampling)
        text, finish = oracle(kit, PROMPT, sampling)
        core, _ = kit.core()
        harness = kit.harness(core)
        harness.finish([harness.open(client)], lambda c, text=text: text[len(c.outputs) :][:5])
        assert (client.outputs, client.finish) == (text, finish)
        assert not {1, 2, 3, 4, kit.eos} & set(client.outputs[:8])
        assert len(client.outputs) >= 8
        ended += client.finish is FinishReason.STOP
    assert ended > 20


def test_the_context_limit_is_a_length_stop(kit, alone) -> None:
    """Cases 10 and 11: sequences end exactly at the limit, whatever is drafted."""
    limit, k = 64, 16
    sampling = SamplingParams(max_tokens=1000, seed=2, temperature=0.0, ignore_eos=True)
    for num_prompt in (limit - 1, limit - k, limit - k - 1, 33):
        prompt = tuple(index % 40 for index in range(num_prompt))
        text = alone(kit.client(prompt, sampling), max_sequence_tokens=limit).outputs
        assert len(text) == limit - num_prompt
        core, _ = kit.core(max_sequence_tokens=limit)
        harness = kit.harness(core)
        client = harness.open(kit.client(prompt, sampling))
        harness.finish(
            [client], lambda c, text=text: text[len(c.outputs) :][: min(k, limit - len(c.ids) - 1)]
        )
        assert (client.outputs, client.finish) == (text, FinishReason.LENGTH)


def test_preempted_requests_resume_with_the_same_text(kit, alone) -> None:
    """Far more than the pool holds: the last in order give way, the first never do, all end as if alone."""
    rng = random.Random(11)
    core, _ = kit.core(num_blocks=8, max_sequence_tokens=128)
    harness = kit.harness(core)
    clients = []
    for index in range(8):
        sampling = SamplingParams(max_tokens=60, seed=index, temperature=0.7 * (index % 2), ignore_eos=True)
        prompt = tuple(rng.randrange(48) for _ in range(rng.randint(1, 60)))
        clients.append(kit.client(prompt, sampling, priority=index % 2, arrival_us=100 - index))
    expected = {c.request_id: alone(c, num_blocks=8, max_sequence_tokens=128).outputs for c in clients}
    for client in clients:
        harness.open(client)
    first = min(clients, key=lambda c: (c.priority, c.arrival_us))
    harness.finish(clients, scripted(expected, rng, "mixed"), rng=rng, max_chunk=40, max_rows=5)
    assert [c.outputs for c in clients] == [expected[c.request_id] for c in clients]
    assert core.counts["preemptions"] > 5
    assert first.generation == 1
    assert core.pool.num_free == 8


def test_neighbours_of_a_broken_row_are_unchanged(kit, alone) -> None:
    """Case 20: NaN logits end that request with a typed error and nothing else."""
    core, model = kit.core()
    harness = kit.harness(core)
    model.broken_ids = {47}
    sampling = SamplingParams(max_tokens=10, seed=1, temperature=0.8, top_k=30, ignore_eos=True)
    good = [harness.open(kit.client(PROMPT[:length], sampling)) for length in (5, 9)]
    bad = harness.open(kit.client((1, 47, 2), sampling))
    done = harness.step_rows([good[0].row(), bad.row([1, 2]), good[1].row()])
    assert [row.status.name for row in done] == ["OK", "NUMERIC_ERROR", "OK"]
    assert bad.request_id not in core.sequences
    assert core.open(1, kit.client((1, 47, *PROMPT), sampling).open_request()).cached_tokens == 0
    good[0].take(done[0])
    good[1].take(done[2])
    model.broken_ids = set()
    harness.finish(good)
    assert [c.outputs for c in good] == [alone(c).outputs for c in good]


def test_logprobs_are_the_models_own(kit) -> None:
    """Before temperature, filters and the mask of min_tokens; as many as asked for, only where asked for."""
    core, _ = kit.core()
    harness = kit.harness(core)
    params = {"seed": 8, "temperature": 1.7, "top_k": 3, "min_tokens": 6, "stop_token_ids": (2, 3)}
    clients = [
        harness.open(kit.client(PROMPT, SamplingParams(max_tokens=6, num_logprobs=n, **params)))
        for n in (None, 0, 4)
    ]
    done = [[], [], []]
    text, _ = oracle(kit, PROMPT, clients[0].sampling)
    for _ in range(2):
        drafts = text[len(clients[0].outputs) :][:2]
        for index, row in enumerate(harness.step_rows([client.row(drafts) for client in clients])):
            done[index] += row.logprobs
            clients[index].take(row)
    assert [len(scores) for scores in done] == [0, 6, 6]
    assert clients[0].outputs == clients[1].outputs == clients[2].outputs == text
    for index, id_ in enumerate(text):
        expected = kit.logits([*PROMPT, *text[:index]]).log_softmax(0)
        for scores in done[1:]:
            assert scores[index].logprob == pytest.approx(expected[id_].item(), abs=1e-5)
        assert done[1][index].top_ids == ()
        top = expected.topk(4)
        assert done[2][index].top_ids == tuple(top.indices.tolist())
        assert done[2][index].top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)
    assert clients[0].margins == []
