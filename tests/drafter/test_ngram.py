"""The n-gram proposer against a plain search of the whole context, and its promises one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsplit.drafter.ngram import NgramContext, NgramProposer
from specsplit.drafter.proposer import Ask, Draft, Opening


def expected_ids(ids: list[int], *, min_n: int, max_n: int, k: int) -> list[int]:
    """The definition: longest suffix first, most recent earlier occurrence, copied on into the draft."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if len(ids) > n and ids[start : start + n] == ids[-n:]:
                longer = list(ids)
                for i in range(k):
                    longer.append(longer[start + n + i])
                return longer[len(ids) :]
    return []


def context(ids: list[int], *, min_n: int = 2, max_n: int = 4) -> NgramContext:
    made = NgramContext(min_n=min_n, max_n=max_n)
    made.extend(ids)
    return made


@given(
    chunks=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8),
    min_n=st.integers(1, 3),
    more_n=st.integers(0, 4),
    k=st.integers(1, 10),
)
def test_every_step_equals_a_search_of_the_whole_context(
    chunks: list[list[int]], min_n: int, more_n: int, k: int
) -> None:
    grown = NgramContext(min_n=min_n, max_n=min_n + more_n)
    ids: list[int] = []
    for chunk in chunks:
        grown.extend(chunk)
        ids += chunk
        draft = grown.propose(k)
        assert list(draft.ids) == expected_ids(ids, min_n=min_n, max_n=min_n + more_n, k=k)
        assert len(draft.confidence) == len(draft.ids)
        assert bool(draft.match_len) == bool(draft.ids)
        if draft.ids:
            suffix = ids[len(ids) - draft.match_len :]
            assert draft.match_len >= min_n
            assert any(
                ids[i : i + draft.match_len] == suffix and ids[i + draft.match_len] == draft.ids[0]
                for i in range(len(ids) - draft.match_len)
            )


def test_the_longest_suffix_goes_before_a_more_recent_short_one() -> None:
    assert context([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3]).propose(1).ids == (70,)


def test_of_equally_long_matches_the_most_recent_wins() -> None:
    assert context([1, 2, 70, 1, 2, 80, 1, 2]).propose(1).ids == (80,)


def test_the_suffix_does_not_match_itself() -> None:
    assert context([1, 2, 3, 4]).propose(4) == Draft()


@pytest.mark.parametrize("ids", [[], [7], [7, 7]])
def test_a_context_too_short_to_match_proposes_nothing(ids: list[int]) -> None:
    assert context(ids).propose(4) == Draft()


@pytest.mark.parametrize("k", [1, 2, 3, 7, 32])
def test_a_periodic_text_continues_for_any_length_and_never_past_the_grant(k: int) -> None:
    assert context([5, 6, 5, 6, 5, 6]).propose(k).ids == tuple([5, 6] * 16)[:k]


def test_confidence_rises_with_the_match_and_along_the_draft() -> None:
    short = context([1, 2, 3, 4, 5, 9, 1, 2]).propose(3)
    long = context([1, 2, 3, 4, 5, 9, 1, 2, 3, 4]).propose(2)
    assert short.match_len == 2
    assert long.match_len == 4
    assert list(short.confidence) == sorted(short.confidence)
    assert 0 < short.confidence[0] < long.confidence[0] < 1


def test_the_match_is_reported_past_max_n() -> None:
    run = [11, 12, 13, 14, 15, 16, 17]
    assert context([*run, 99, *run], max_n=3).propose(1).match_len == len(run)


def test_ids_up_to_the_wires_largest_are_taken() -> None:
    largest = 2**32 - 1
    assert context([largest, 0, largest, 0]).propose(2).ids == (largest, 0)


def test_a_batch_is_answered_in_the_order_of_its_asks() -> None:
    proposer = NgramProposer(min_n=2, max_n=3)
    states = [proposer.open(Opening([n, 1, 2, n, n, 1], n, None)) for n in range(10, 20)]
    drafts = proposer.propose([Ask(state, 2) for state in reversed(states)])
    assert [draft.ids for draft in drafts] == [(2, n) for n in range(19, 9, -1)]
