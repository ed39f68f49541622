"""Turns between streams: fair, in order within a stream, within the budget."""

from __future__ import annotations

from specsplit.core.types import CloseRequest, Step, StepRow
from specsplit.verifier.mailbox import Mailbox, Waiting


def step(number: int, num_tokens: int, num_rows: int = 1) -> Waiting:
    rows = tuple(StepRow(bytes(16), 1, 9, 0, 0, num_tokens) for _ in range(num_rows))
    return Waiting(Step(number, rows), float(number))


def mailbox(**steps: list[Waiting]) -> Mailbox:
    box = Mailbox(max_step_tokens=100, max_step_rows=4)
    for owner, waiting in enumerate(steps.values(), 1):
        box.add_stream(owner)
        for item in waiting:
            box.put(owner, item)
    return box


def taken(box: Mailbox) -> list[tuple[int, int]]:
    assert list(box.take_until_steps()) == []
    return [(owner, step.step_id) for owner, step, _ in box.take_steps()]


def test_one_step_of_each_stream_at_a_time() -> None:
    box = mailbox(a=[step(1, 10), step(2, 10)], b=[step(3, 10)], c=[])
    assert taken(box) == [(1, 1), (2, 3)]
    assert taken(box) == [(1, 2)]
    assert taken(box) == []
    assert box.is_empty


def test_a_stream_that_did_not_fit_goes_first_next_time() -> None:
    box = mailbox(a=[step(1, 60), step(2, 60)], b=[step(3, 60), step(4, 60)], c=[step(5, 30), step(6, 30)])
    assert [taken(box) for _ in range(5)] == [[(1, 1)], [(2, 3), (3, 5)], [(1, 2)], [(2, 4), (3, 6)], []]


def test_rows_have_a_budget_too_and_the_first_step_always_goes() -> None:
    box = mailbox(a=[step(1, 1, num_rows=3)], b=[step(2, 1, num_rows=2)], c=[step(3, 500)])
    assert [taken(box) for _ in range(3)] == [[(1, 1)], [(2, 2)], [(3, 3)]]


def test_commands_stay_behind_the_step_before_them() -> None:
    close = CloseRequest(bytes(16), 1)
    box = mailbox(a=[Waiting(close, 0.0), step(1, 10), Waiting(close, 0.0), step(2, 10)])
    assert list(box.take_until_steps()) == [(1, close)]
    assert list(box.take_until_steps()) == []
    assert len(box.take_steps()) == 1
    assert list(box.take_until_steps()) == [(1, close)]
    assert len(box.take_steps()) == 1


def test_a_stream_that_left_waits_for_nothing() -> None:
    box = mailbox(a=[step(1, 10)], b=[step(2, 10)])
    box.remove_stream(1)
    assert 1 not in box
    assert taken(box) == [(2, 2)]
