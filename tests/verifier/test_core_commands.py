"""What a gateway relies on: every row says who it is; a wrong one is refused and changes nothing."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest

from specsplit.core.types import (
    Assumption,
    CloseRequest,
    FinishReason,
    SamplingParams,
    SparseDistribution,
    Status,
    Step,
    VerificationMode,
)

GREEDY = SamplingParams(max_tokens=30, seed=1, temperature=0.0, ignore_eos=True)
PROMPT = tuple(range(20))


def held(core):
    """All that a command could change."""
    return copy.deepcopy(
        {
            s.request_id: (s.generation, s.owner, s.ids, s.block_table, s.num_computed, s.num_cached_blocks)
            for s in core.sequences.values()
        }
    )


@pytest.fixture
def opened(kit):
    """A core with one decoding request on stream 1."""
    core, _ = kit.core()
    harness = kit.harness(core)
    client = harness.open(kit.client(PROMPT, GREEDY))
    client.take(harness.step_rows([client.row()])[0])
    return core, harness, client


WRONG_ROWS = {
    "unknown": (lambda r: replace(r, request_id=bytes(16)), Status.UNKNOWN_REQUEST, "not open"),
    "older generation": (lambda r: replace(r, generation=0), Status.STALE_GENERATION, "generation 1"),
    "newer generation": (lambda r: replace(r, generation=2), Status.STALE_GENERATION, "generation 1"),
    "base behind": (lambda r: replace(r, base_len=20, num_computed=19), Status.STALE_BASE, "base_len 21"),
    "base ahead": (lambda r: replace(r, base_len=22, num_tokens=2), Status.STALE_BASE, "base_len 21"),
    "computed behind": (
        lambda r: replace(r, num_computed=19, num_tokens=2),
        Status.STALE_BASE,
        "computed 20",
    ),
    "digest": (lambda r: replace(r, digest=r.digest ^ 1), Status.DIGEST_MISMATCH, "held"),
    "draft past the vocabulary": (lambda r: replace(r, draft_ids=(1, 48)), Status.INVALID, "draft_ids"),
    "no tokens": (lambda r: replace(r, num_tokens=0), Status.INVALID, "num_tokens"),
    "too many tokens": (lambda r: replace(r, num_tokens=2), Status.INVALID, "num_tokens"),
    "past the context": (lambda r: replace(r, draft_ids=(1,) * 235), Status.INVALID, "draft_ids"),
    "draft distribution": (
        lambda r: replace(r, draft_ids=(1,), draft_probs=(SparseDistribution((1,), (1.0,)),)),
        Status.UNSUPPORTED,
        "draft_probs",
    ),
    "optimistic": (lambda r: replace(r, assumes=Assumption((1,), 2)), Status.UNSUPPORTED, "assumes"),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_a_wrong_row_is_refused_and_changes_nothing_while_others_go_on(kit, alone, opened, name) -> None:
    core, harness, client = opened
    change, status, detail = WRONG_ROWS[name]
    other = harness.open(kit.client(PROMPT[:7], GREEDY))
    before = held(core)[client.request_id]
    refused, fine = harness.step_rows([change(client.row()), other.row()])
    assert refused.status is status
    assert detail in refused.detail
    assert not refused.committed_ids
    assert held(core)[client.request_id] == before
    other.take(fine)
    harness.finish([client, other])
    assert client.outputs == alone(client).outputs
    assert core.counts["invariant_violations"] == (status is Status.DIGEST_MISMATCH)


def test_only_the_stream_that_opened_may_step_or_close(opened) -> None:
    core, _, client = opened
    before = held(core)
    (row,) = core.step([(2, Step(1, (client.row(),)))]).steps[0]
    assert row.status is Status.NOT_OWNER
    core.close(2, client.close_request())
    assert core.open(2, client.open_request()).status is Status.NOT_OWNER
    core.close_owner(2)
    assert held(core) == before


def test_a_greater_generation_takes_a_request_over_from_a_stream_that_hangs(opened) -> None:
    """A gateway that lost its connection may be back before the verifier has noticed the loss."""
    core, _, client = opened
    assert core.open(2, replace(client.open_request(), generation=9)).status is Status.OK
    (row,) = core.step([(1, Step(1, (client.row(),)))]).steps[0]
    assert row.status is Status.NOT_OWNER
    core.close_owner(1)
    assert client.request_id in core.sequences
    core.close_owner(2)
    assert client.request_id not in core.sequences


def test_a_request_twice_in_a_step_runs_once(opened) -> None:
    _, harness, client = opened
    first, second = harness.step_rows([client.row(), client.row()])
    assert (first.status, second.status) == (Status.OK, Status.INVALID)
    assert "request_id" in second.detail


def test_a_step_past_the_budget_is_refused_whole(kit) -> None:
    core, model = kit.core(max_step_tokens=30, max_step_rows=3)
    harness = kit.harness(core)
    clients = [harness.open(kit.client((index, *PROMPT), GREEDY)) for index in range(4)]
    for rows, field in (
        ([clients[0].row(), clients[1].row(chunk=10)], "max_step_tokens"),
        ([client.row(chunk=1) for client in clients], "max_step_rows"),
    ):
        before = held(core)
        for done in harness.step_rows(rows):
            assert done.status is Status.INVALID
            assert field in done.detail
        assert held(core) == before
    assert model.num_computed == 0
    assert all(d.status is Status.OK for d in harness.step_rows([clients[0].row(), clients[1].row(chunk=9)]))


def test_an_empty_step_is_answered(kit) -> None:
    core, _ = kit.core()
    assert core.step([(1, Step(5, ()))]).steps == [()]


def test_the_last_verdict_is_given_again(kit, opened) -> None:
    """After a chunk and after a run: the same row gets the same verdict and nothing is computed."""
    core, harness, client = opened
    chunked = harness.open(kit.client((*PROMPT, *PROMPT), GREEDY))
    model = core._model
    for row in (chunked.row(chunk=13), client.row([1, 2, 3])):
        (first,) = harness.step_rows([row])
        before, computed = held(core), model.num_computed
        (again,) = harness.step_rows([replace(row, draft_ids=())])
        assert again == replace(first, is_replay=True)
        assert (held(core), model.num_computed) == (before, computed)
    assert core.counts["replays"] == 2
    older = client.row()
    client.take(first)
    client.take(harness.step_rows([client.row()])[0])
    assert harness.step_rows([older])[0].status is Status.STALE_BASE


def test_an_ended_request_answers_only_replays(kit) -> None:
    core, _ = kit.core()
    harness = kit.harness(core)
    client = harness.open(kit.client(PROMPT, replace(GREEDY, max_tokens=1)))
    row = client.row()
    client.take(harness.step_rows([row])[0])
    assert client.finish is FinishReason.LENGTH
    assert harness.step_rows([row])[0].is_replay
    (done,) = harness.step_rows([client.row()])
    assert (done.status, "ended" in done.detail) == (Status.INVALID, True)
    harness.close(client)
    assert harness.step_rows([row])[0].status is Status.UNKNOWN_REQUEST


OPENS = {
    "prompt id": (lambda o: replace(o, prompt_ids=(1, 48)), Status.INVALID, "prompt_ids"),
    "no prompt": (lambda o: replace(o, prompt_ids=()), Status.INVALID, "prompt_ids"),
    "output id": (lambda o: replace(o, output_ids=(99,)), Status.INVALID, "output_ids"),
    "outputs fill max_tokens": (lambda o: replace(o, output_ids=(1,) * 30), Status.INVALID, "output_ids"),
    "stop id": (
        lambda o: replace(o, sampling=replace(GREEDY, stop_token_ids=(48,))),
        Status.INVALID,
        "stop_token_ids",
    ),
    "no room": (lambda o: replace(o, prompt_ids=(1,) * 256), Status.TOO_LONG, "256"),
    "rejection": (
        lambda o: replace(o, sampling=replace(GREEDY, verification=VerificationMode.REJECTION)),
        Status.UNSUPPORTED,
        "verification",
    ),
}


@pytest.mark.parametrize("name", OPENS)
def test_a_wrong_open_is_refused_and_changes_nothing(kit, opened, name) -> None:
    core, _, client = opened
    change, status, detail = OPENS[name]
    before = held(core)
    for request in (kit.client(PROMPT, GREEDY).open_request(), replace(client.open_request(), generation=2)):
        answer = core.open(1, change(request))
        assert answer.status is status
        assert detail in answer.detail
        assert held(core) == before


def test_generations_fence_opens_and_closes(opened, alone) -> None:
    core, harness, client = opened
    assert core.open(1, client.open_request()).status is Status.STALE_GENERATION
    client.generation = 3
    harness.open(client)
    core.close(1, CloseRequest(client.request_id, 2))
    assert client.request_id in core.sequences
    core.close(1, CloseRequest(bytes(16), 1))
    harness.finish([client])
    assert client.outputs == alone(client).outputs
    assert not core.sequences


def test_a_draining_core_finishes_what_is_open(kit, opened, alone) -> None:
    core, harness, client = opened
    core.is_draining = True
    assert core.open(1, kit.client(PROMPT, GREEDY).open_request()).status is Status.DRAINING
    harness.finish([client])
    assert client.outputs == alone(client).outputs


def test_a_failed_step_costs_its_own_requests_only(kit, opened, alone, caplog) -> None:
    core, harness, client = opened
    bystander = harness.open(kit.client(PROMPT[:5], GREEDY))
    victim = harness.open(kit.client((47, 1), GREEDY))
    core._model.failing_ids = {47}
    done = harness.step_rows([client.row(), victim.row()])
    assert [(row.status, row.detail) for row in done] == [
        (Status.INTERNAL, "RuntimeError: planted failure")
    ] * 2
    assert core.counts["step_failures"] == 1
    assert "planted failure" in caplog.text
    assert list(core.sequences) == [bystander.request_id]
    core._model.failing_ids = set()
    client.generation = 2
    harness.open(client)
    harness.finish([client, bystander])
    assert client.outputs == alone(client).outputs


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 32, 33, 100])
def test_a_second_request_finds_all_full_blocks_before_its_last_token(kit, num_prompt) -> None:
    core, model = kit.core()
    harness = kit.harness(core)
    prompt = tuple(index % 40 for index in range(num_prompt))
    first, second = kit.client(prompt, GREEDY), kit.client(prompt, GREEDY)
    harness.finish([harness.open(first)])
    computed = model.num_computed
    harness.open(second)
    assert (first.num_cached, second.num_cached) == (0, (num_prompt - 1) // 16 * 16)
    harness.finish([second])
    assert second.outputs == first.outputs
    assert model.num_computed - computed == computed - second.num_cached


def test_outputs_are_cached_too_but_never_unverified_tokens(kit) -> None:
    core, _ = kit.core()
    harness = kit.harness(core)
    client = harness.open(kit.client(PROMPT, replace(GREEDY, max_tokens=60)))
    harness.finish([client], lambda c: [5] * 20 if len(c.ids) < 50 else ())  # wrong drafts over whole blocks
    again = harness.open(kit.client(tuple(client.ids), GREEDY))
    assert again.num_cached == (len(client.ids) - 1) // 16 * 16
    drafted = harness.open(kit.client((*client.ids[:21], *[5] * 20), GREEDY))
    assert drafted.num_cached == 16


def test_one_long_prefix_many_endings(kit, alone) -> None:
    """Case 12: at once and again; equal to their runs alone, and cached the second time."""
    core, _ = kit.core(num_blocks=200)
    harness = kit.harness(core)
    system = tuple(index % 37 for index in range(100))
    rounds = []
    for _ in range(2):
        clients = [harness.open(kit.client((*system, *[index] * 14, 1), GREEDY)) for index in range(16)]
        harness.finish(clients, rng=random.Random(0), max_chunk=30)
        rounds.append(clients)
    assert [c.num_cached for c in rounds[1]] == [112] * 16
    expected = [alone(c).outputs for c in rounds[0]]
    assert [[c.outputs for c in clients] for clients in rounds] == [expected, expected]


def test_salts_share_nothing(kit) -> None:
    core, _ = kit.core()
    harness = kit.harness(core)
    harness.finish([harness.open(kit.client(PROMPT * 2, GREEDY, salt=b"a"))])
    cached = [
        harness.open(kit.client(PROMPT * 2, GREEDY, salt=salt)).num_cached for salt in (b"", b"b", b"a")
    ]
    assert cached == [0, 0, 32]


def test_the_last_in_order_gives_way_and_a_row_may_preempt_itself(kit) -> None:
    core, _ = kit.core(num_blocks=4, max_sequence_tokens=64)
    harness = kit.harness(core)
    late = harness.open(kit.client(tuple(range(30)), GREEDY, arrival_us=9))
    early = harness.open(kit.client(tuple(range(1, 41)), GREEDY, arrival_us=1))
    latest = harness.open(kit.client((3,), GREEDY, arrival_us=20))
    late.take(harness.step_rows([late.row()])[0])
    done = harness.step([late.row(), early.row(), latest.row()])
    by_id = {
        client.request_id: name for client, name in ((late, "late"), (early, "early"), (latest, "latest"))
    }
    assert [by_id[p.request_id] for _, p in done.preempted] == ["late"]
    assert [row.status for row in done.steps[0]] == [Status.PREEMPTED, Status.OK, Status.OK]
    early.take(done.steps[0][1])
    latest.take(done.steps[0][2])
    done = harness.step([latest.row([1] * 30)])  # needs two more blocks than there are
    assert [by_id[p.request_id] for _, p in done.preempted] == ["latest"]
    assert [row.status for row in done.steps[0]] == [Status.PREEMPTED]
    assert list(core.sequences) == [early.request_id]


def test_an_other_streams_request_can_be_preempted(kit) -> None:
    core, _ = kit.core(num_blocks=2, max_sequence_tokens=32)
    harness = kit.harness(core, owner=2)
    late = harness.open(kit.client(tuple(range(20)), GREEDY, priority=1))
    late.take(harness.step_rows([late.row()])[0])
    harness.owner = 1
    early = harness.open(kit.client((1, 2), GREEDY))
    done = harness.step([early.row()])
    assert [(owner, event.request_id) for owner, event in done.preempted] == [(2, late.request_id)]
    assert done.steps[0][0].status is Status.OK


@pytest.mark.parametrize("seed", range(8))
def test_random_commands_keep_the_books(kit, seed) -> None:
    """Right and wrong commands of three streams in any order: the harness checks every balance after each."""
    rng = random.Random(seed)
    core, _ = kit.core(num_blocks=12, max_sequence_tokens=96, max_step_tokens=200, max_step_rows=6)
    harnesses = {owner: kit.harness(core, owner=owner) for owner in (1, 2, 3)}
    clients = []
    for _ in range(400):
        owner = rng.choice((1, 2, 3))
        harness = harnesses[owner]
        action = rng.random()
        if action < 0.15:
            prompt = tuple(rng.choice((1, 2)) for _ in range(rng.randint(1, 60)))
            sampling = SamplingParams(
                max_tokens=rng.randint(1, 40), seed=rng.getrandbits(64), temperature=0.5
            )
            client = kit.client(prompt, sampling, priority=rng.randint(0, 2), arrival_us=rng.randint(0, 9))
            core.open(owner, client.open_request())
            clients.append(client)
        elif action < 0.2 and clients:
            client = rng.choice(clients)
            core.close(owner, client.close_request())
        elif action < 0.22:
            core.close_owner(owner)
        elif clients:
            rows = []
            for client in rng.sample(clients, k=min(len(clients), rng.randint(1, 5))):
                state = core.sequences.get(client.request_id)
                if state is not None and rng.random() < 0.9:  # catch up with what the core holds
                    client.outputs = state.ids[len(client.prompt) :]
                    client.num_computed = state.num_computed
                if client.num_computed == len(client.ids):
                    continue
                rows.append(
                    client.row([rng.randrange(50) for _ in range(rng.randint(0, 5))], rng.randint(1, 40))
                )
            done = core.step([(rng.choice((1, 2, 3)), Step(0, tuple(rows)))])
            assert len(done.steps[0]) == len(rows)
        harness.check()
        clients = [c for c in clients if c.request_id in core.sequences or rng.random() < 0.9]
    for owner in harnesses:
        core.close_owner(owner)
    assert core.pool.num_free == 12
    assert core.counts["rows_ok"] > 50
