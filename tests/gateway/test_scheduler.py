"""What is opened and what a step computes: order, budgets, memory. No I/O."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from specsplit.core.trace_context import start_span
from specsplit.core.types import (
    CloseRequest,
    FinishReason,
    Order,
    RowDone,
    SamplingParams,
    Status,
    VerifierDescription,
    new_request_id,
)
from specsplit.gateway.request import AdmittedRequest
from specsplit.gateway.scheduler import choose_to_open, schedule
from specsplit.gateway.sequence import Phase, Sequence
from specsplit.gateway.text.tokenizer import Tokenizer

VERIFIER = VerifierDescription(
    model="m",
    revision="",
    dtype="float32",
    numerics="n",
    tokenizer_digest="",
    vocab_size=259,
    max_sequence_tokens=256,
    block_size=16,
    num_blocks=64,
    max_step_tokens=64,
    max_step_rows=8,
    incarnation=b"i" * 16,
    registry_namespace=b"n" * 8,
    eos_token_ids=(258,),
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


def make(
    tokenizer: Tokenizer,
    *,
    arrival: int,
    num_prompt: int = 8,
    max_tokens: int = 100,
    k: int = 4,
    priority: int = 0,
    stop: tuple[str, ...] = (),
    min_tokens: int = 0,
) -> Sequence:
    id_ = new_request_id()
    return Sequence(
        AdmittedRequest(
            request_id=id_,
            order=Order(priority, arrival, id_),
            prompt_ids=[ord("a") - 33] * num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=0, min_tokens=min_tokens),
            stop=stop,
            k=k,
            trace=start_span("", ratio=0),
        ),
        tokenizer,
        admitted_ns=0,
    )


def running(sequence: Sequence, *, computed: int) -> Sequence:
    sequence.open()
    sequence.opened(0, at_ns=1)
    sequence.num_computed = computed
    return sequence


def commit(sequence: Sequence, ids: list[int], *, accepted: int, finish: FinishReason | None = None) -> None:
    base = len(sequence.token_ids)
    sequence.commit(
        RowDone(
            request_id=sequence.request.request_id,
            generation=sequence.generation,
            base_len=base,
            status=Status.OK,
            num_computed=base + len(ids) - 1,
            committed_ids=tuple(ids),
            num_accepted=accepted,
            finish_reason=finish,
        ),
        num_drafts=4,
        no_draft_reason=None,
        is_prefill=False,
        at_ns=2,
    )


def test_rows_are_in_order_whatever_the_container_says(tokenizer: Tokenizer) -> None:
    sequences = [running(make(tokenizer, arrival=i, priority=i % 2), computed=7) for i in range(6)]
    expected = [(s.request.order.priority, s.request.order.arrival_us) for s in sequences]
    for seed in range(5):
        shuffled = random.Random(seed).sample(sequences, len(sequences))
        rows = schedule(shuffled, VERIFIER, max_prefill_tokens=16)
        got = [(r.sequence.request.order.priority, r.sequence.request.order.arrival_us) for r in rows]
        assert got == sorted(expected)


def test_decoding_rows_come_before_prefill_and_leave_it_the_rest(tokenizer: Tokenizer) -> None:
    prefill = running(make(tokenizer, arrival=0, num_prompt=200), computed=0)
    decoding = [running(make(tokenizer, arrival=1 + i), computed=7) for i in range(3)]
    rows = schedule([prefill, *decoding], VERIFIER, max_prefill_tokens=1000)
    assert [r.num_tokens for r in rows] == [1, 1, 1, 64 - 3 * 5]
    assert [r.max_draft for r in rows] == [4, 4, 4, 0]


def test_prefill_is_bounded_by_its_own_limit(tokenizer: Tokenizer) -> None:
    first = running(make(tokenizer, arrival=0, num_prompt=20), computed=0)
    second = running(make(tokenizer, arrival=1, num_prompt=200), computed=0)
    rows = schedule([second, first], VERIFIER, max_prefill_tokens=32)
    assert [(r.sequence, r.num_tokens) for r in rows] == [(first, 20), (second, 12)]


def test_drafts_shrink_in_order_when_the_token_budget_is_short(tokenizer: Tokenizer) -> None:
    sequences = [running(make(tokenizer, arrival=i, k=32), computed=7) for i in range(4)]
    rows = schedule(sequences, VERIFIER, max_prefill_tokens=32)
    assert [r.max_draft for r in rows] == [32, 28, 0, 0]
    assert sum(r.num_tokens + r.max_draft for r in rows) == VERIFIER.max_step_tokens


def test_drafts_do_not_starve_a_prompt_nor_a_prompt_the_drafts(tokenizer: Tokenizer) -> None:
    decoding = [running(make(tokenizer, arrival=i, k=32), computed=7) for i in range(4)]
    prompt = running(make(tokenizer, arrival=9, num_prompt=200), computed=0)
    rows = schedule([prompt, *decoding], VERIFIER, max_prefill_tokens=256)
    assert [r.max_draft for r in rows] == [30, 0, 0, 0, 0]
    assert rows[-1].num_tokens == 30
    assert sum(r.num_tokens + r.max_draft for r in rows) == VERIFIER.max_step_tokens


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, 0), (2, 1), (3, 2), (5, 4), (6, 4)])
def test_no_draft_past_max_tokens(tokenizer: Tokenizer, max_tokens: int, expected: int) -> None:
    rows = schedule(
        [running(make(tokenizer, arrival=0, max_tokens=max_tokens), computed=7)],
        VERIFIER,
        max_prefill_tokens=8,
    )
    assert rows[0].max_draft == expected


@pytest.mark.parametrize(("num_prompt", "expected"), [(255, 0), (254, 1), (251, 4), (250, 4)])
def test_no_draft_past_the_context(tokenizer: Tokenizer, num_prompt: int, expected: int) -> None:
    sequence = running(make(tokenizer, arrival=0, num_prompt=num_prompt), computed=num_prompt - 1)
    assert schedule([sequence], VERIFIER, max_prefill_tokens=8)[0].max_draft == expected


def test_waiting_requests_open_in_order_while_they_fit(tokenizer: Tokenizer) -> None:
    waiting = [make(tokenizer, arrival=i, num_prompt=31) for i in range(4)]  # 2 blocks each
    assert choose_to_open(reversed(waiting), VERIFIER, free_blocks=5) == waiting[:2]


def test_nothing_overtakes_a_request_that_does_not_fit(tokenizer: Tokenizer) -> None:
    large, small = make(tokenizer, arrival=0, num_prompt=200), make(tokenizer, arrival=1, num_prompt=1)
    assert choose_to_open([small, large], VERIFIER, free_blocks=3) == []


def test_blocks_that_a_request_before_it_still_needs_are_not_free(tokenizer: Tokenizer) -> None:
    prefilling = running(make(tokenizer, arrival=0, num_prompt=100), computed=16)  # needs 6 more, 1 to grow
    waiting = make(tokenizer, arrival=1, num_prompt=15)
    assert choose_to_open([prefilling, waiting], VERIFIER, free_blocks=7) == []
    assert choose_to_open([prefilling, waiting], VERIFIER, free_blocks=8) == [waiting]


def test_a_request_before_others_may_count_on_their_blocks(tokenizer: Tokenizer) -> None:
    later = running(make(tokenizer, arrival=5, num_prompt=100), computed=99)
    urgent = make(tokenizer, arrival=9, num_prompt=64, priority=-1)
    assert choose_to_open([later, urgent], VERIFIER, free_blocks=0) == [urgent]


def test_no_more_requests_are_opened_than_a_step_has_rows(tokenizer: Tokenizer) -> None:
    waiting = [make(tokenizer, arrival=i) for i in range(20)]
    assert len(choose_to_open(waiting, VERIFIER, free_blocks=64)) == VERIFIER.max_step_rows


def test_a_stop_string_cuts_ids_usage_and_acceptance_alike(tokenizer: Tokenizer) -> None:
    sequence = running(make(tokenizer, arrival=0, stop=("cd",)), computed=7)
    ids = tokenizer.encode("abcdef", add_special_tokens=False)
    commit(sequence, ids, accepted=4)
    delta, finished = sequence.events.get_nowait(), sequence.events.get_nowait()
    assert (delta.text, delta.ids) == ("ab", tuple(ids[:4]))
    assert finished.finish_reason is FinishReason.STOP
    assert finished.usage.completion_tokens == 4
    assert finished.usage.accepted_by_position == (1, 1, 1, 1)
    assert sequence.is_finished


def test_a_stop_token_counts_but_has_no_text(tokenizer: Tokenizer) -> None:
    sequence = running(make(tokenizer, arrival=0), computed=7)
    ids = tokenizer.encode("abx", add_special_tokens=False)
    commit(sequence, ids, accepted=2, finish=FinishReason.STOP)
    delta, finished = sequence.events.get_nowait(), sequence.events.get_nowait()
    assert delta.text == "ab"
    assert finished.usage.completion_tokens == 3


def test_no_stop_string_ends_a_request_before_min_tokens(tokenizer: Tokenizer) -> None:
    for min_tokens, expected in ((0, "a"), (2, "a"), (3, "abca"), (8, "abcabca")):
        sequence = running(make(tokenizer, arrival=0, stop=("bc",), min_tokens=min_tokens), computed=7)
        commit(sequence, tokenizer.encode("abcabcabc", add_special_tokens=False), accepted=8)
        assert sequence.events.get_nowait().text == expected
        assert sequence.events.get_nowait().finish_reason is FinishReason.STOP


def test_eviction_keeps_committed_tokens_and_raises_the_generation(tokenizer: Tokenizer) -> None:
    sequence = running(make(tokenizer, arrival=0), computed=7)
    commit(sequence, tokenizer.encode("ab", add_special_tokens=False), accepted=1)
    digest = sequence.digest
    sequence.evicted()
    assert sequence.phase is Phase.WAITING
    again = sequence.open()
    assert (again.generation, list(again.output_ids)) == (2, sequence.token_ids[8:])
    assert sequence.digest == digest
    assert sequence.close() == CloseRequest(sequence.request.request_id, 2)


def test_a_description_with_fewer_rows_opens_fewer(tokenizer: Tokenizer) -> None:
    small = dataclasses.replace(VERIFIER, max_step_rows=2)
    waiting = [make(tokenizer, arrival=i) for i in range(5)]
    assert choose_to_open(waiting, small, free_blocks=64) == waiting[:2]


def test_a_step_never_has_more_rows_than_tokens(tokenizer: Tokenizer) -> None:
    verifier = dataclasses.replace(VERIFIER, max_step_tokens=3)
    waiting = [make(tokenizer, arrival=i) for i in range(6)]
    assert choose_to_open(waiting, verifier, free_blocks=64) == waiting[:3]
    decoding = [running(make(tokenizer, arrival=i), computed=7) for i in range(6)]
    rows = schedule(decoding, verifier, max_prefill_tokens=16)
    assert [(r.sequence, r.num_tokens, r.max_draft) for r in rows] == [(s, 1, 0) for s in decoding[:3]]
