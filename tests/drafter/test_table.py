"""What connects, what is refused, what is forgotten: the table with a fake clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specsplit.core.types import DraftStatus
from specsplit.drafter.ngram import NgramContext, NgramProposer
from specsplit.drafter.table import DraftTable, Held, Refusal

STREAM = 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> DraftTable[NgramContext]:
    return DraftTable(NgramProposer(min_n=2, max_n=4), max_context_tokens=100, idle_seconds=10.0, clock=clock)


Sequencer = Callable[..., Any]


def refused(outcome: object, status: DraftStatus, word: str) -> None:
    assert isinstance(outcome, Refusal), outcome
    assert outcome.status is status
    assert word in outcome.detail


def test_increments_connect(table: DraftTable[NgramContext], sequence: Sequencer) -> None:
    request = sequence([1, 2, 3])
    first = table.take(STREAM, request.row())
    request.ids += [4, 5]
    second = table.take(STREAM, request.row())
    third = table.take(STREAM, request.row())  # nothing new: the same base again
    assert isinstance(first, Held)
    assert first is second is third
    assert (first.length, table.num_context_tokens) == (5, 5)


@pytest.mark.parametrize("told", [1, 2, 4])
def test_a_gap_or_an_overlap_is_never_repaired(
    table: DraftTable[NgramContext], sequence: Sequencer, told: int
) -> None:
    request = sequence([1, 2, 3])
    table.take(STREAM, request.row())
    request.ids += [4, 5]
    request.told = told
    refused(table.take(STREAM, request.row()), DraftStatus.NEED_CONTEXT, "3 tokens")
    assert (len(table), table.num_context_tokens) == (0, 0)
    request.told = 0
    assert isinstance(table.take(STREAM, request.row()), Held)


def test_an_unknown_request_needs_context(table: DraftTable[NgramContext], sequence: Sequencer) -> None:
    refused(table.take(STREAM, sequence([1, 2, 3], told=2).row()), DraftStatus.NEED_CONTEXT, "not held")
    refused(table.take(STREAM, sequence([1, 2, 3], told=3).row()), DraftStatus.NEED_CONTEXT, "not held")


def test_a_wrong_digest_of_an_increment_drops_the_state(
    table: DraftTable[NgramContext], sequence: Sequencer
) -> None:
    request = sequence([1, 2, 3])
    table.take(STREAM, request.row())
    request.ids.append(4)
    refused(table.take(STREAM, request.row(digest=1)), DraftStatus.NEED_CONTEXT, "digest")
    assert len(table) == 0


def test_a_wrong_digest_of_a_whole_sequence_is_invalid(
    table: DraftTable[NgramContext], sequence: Sequencer
) -> None:
    refused(table.take(STREAM, sequence([1, 2]).row(digest=1)), DraftStatus.INVALID, "digest")
    assert len(table) == 0


@pytest.mark.parametrize(
    ("ids", "changes", "field"),
    [
        ([], {}, "base_len"),
        ([1], {"prompt_len": 2}, "prompt_len"),
        ([1] * 101, {}, "base_len"),
    ],
)
def test_values_out_of_range_name_the_field(
    table: DraftTable[NgramContext],
    sequence: Sequencer,
    ids: list[int],
    changes: dict[str, int],
    field: str,
) -> None:
    refused(table.take(STREAM, sequence(ids).row(**changes)), DraftStatus.INVALID, field)
    assert len(table) == 0


def test_a_newer_generation_restarts_only_from_the_whole_sequence(
    table: DraftTable[NgramContext], sequence: Sequencer
) -> None:
    request = sequence([1, 2, 3])
    table.take(STREAM, request.row())
    request.generation = 2
    refused(table.take(STREAM, request.row()), DraftStatus.NEED_CONTEXT, "generation")
    request.told = 0
    held = table.take(STREAM, request.row())
    assert isinstance(held, Held)
    assert held.generation == 2
    refused(table.take(STREAM, request.row(generation=1)), DraftStatus.INVALID, "generation")
    assert table.holds(STREAM, request.request_id, held)


def test_streams_do_not_share_a_request(table: DraftTable[NgramContext], sequence: Sequencer) -> None:
    old, new = sequence([1, 2, 3]), sequence([7, 8])
    new.request_id = old.request_id
    table.take(1, old.row())
    held = table.take(2, new.row())
    table.drop_stream(1)
    assert isinstance(held, Held)
    assert table.holds(2, new.request_id, held)
    assert table.num_context_tokens == 2


def test_the_least_recently_used_goes_first(table: DraftTable[NgramContext], sequence: Sequencer) -> None:
    first, second, third = (sequence([n] * 40) for n in (1, 2, 3))
    table.take(STREAM, first.row())
    table.take(STREAM, second.row())
    table.take(STREAM, first.row())
    table.take(STREAM, third.row())
    assert table.num_context_tokens == 80
    refused(table.take(STREAM, second.row()), DraftStatus.NEED_CONTEXT, "not held")
    assert isinstance(table.take(STREAM, first.row()), Held)


def test_growing_counts_against_the_bound(table: DraftTable[NgramContext], sequence: Sequencer) -> None:
    first, second = sequence([1] * 50), sequence([2] * 50)
    table.take(STREAM, first.row())
    held = table.take(STREAM, second.row())
    second.ids.append(2)
    assert table.take(STREAM, second.row()) is held
    assert (len(table), table.num_context_tokens) == (1, 51)
    second.ids += [2] * 50
    refused(table.take(STREAM, second.row()), DraftStatus.INVALID, "base_len")
    assert (len(table), table.num_context_tokens) == (0, 0)


def test_idle_requests_are_forgotten(
    table: DraftTable[NgramContext], sequence: Sequencer, clock: Clock
) -> None:
    idle, used = sequence([1, 2]), sequence([3, 4])
    table.take(STREAM, idle.row())
    table.take(STREAM, used.row())
    clock.now = 8.0
    table.take(STREAM, used.row())
    clock.now = 12.0
    table.drop_idle()
    assert (len(table), table.num_context_tokens) == (1, 2)
    refused(table.take(STREAM, idle.row()), DraftStatus.NEED_CONTEXT, "not held")
