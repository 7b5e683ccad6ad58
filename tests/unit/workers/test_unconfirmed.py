"""Records stay until they are durable, whatever becomes of controllers."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_plus.training.exchange.step_records import Evaluated, Record, Remark, StepRecord
from raytrain_plus.workers import unconfirmed as module
from raytrain_plus.workers.unconfirmed import Unconfirmed


def steps(*numbers: int) -> list[Record]:
    return [StepRecord(step=number, rows=1, loss=0.0, seconds=0.0, waited_s=0.0, time=0.0) for number in numbers]


def told(unconfirmed: Unconfirmed) -> list[tuple[int, Any]]:
    return [(number, getattr(record, "step", record)) for number, record in unconfirmed.all()]


def test_what_was_sent_is_forgotten_once_it_is_durable() -> None:
    unconfirmed = Unconfirmed()
    unconfirmed.add(4, steps(0, 1))
    assert unconfirmed.next(4) == steps(0, 1)
    unconfirmed.add(4, steps(2))
    unconfirmed.confirm(1)
    assert told(unconfirmed) == [(4, 2)]
    # It was not sent, whatever else is durable.
    unconfirmed.confirm(2)
    assert told(unconfirmed) == [(4, 2)]
    assert unconfirmed.next(4) == steps(2)
    assert unconfirmed.next(4) == []
    unconfirmed.confirm(99)
    assert told(unconfirmed) == []


def test_an_evaluation_is_told_after_its_step_and_kept_until_a_later_one_is_durable() -> None:
    unconfirmed, evaluated = Unconfirmed(), Evaluated(step=5, metrics={})
    unconfirmed.add(4, [evaluated])
    assert unconfirmed.next(4) == [evaluated]
    unconfirmed.confirm(5)
    assert told(unconfirmed) == [(4, 5)]
    unconfirmed.confirm(6)
    assert told(unconfirmed) == []


def test_each_generation_sends_its_own_records() -> None:
    unconfirmed = Unconfirmed()
    unconfirmed.add(4, steps(7))
    unconfirmed.add(5, steps(7, 8))
    assert unconfirmed.next(5) == steps(7, 8)
    assert told(unconfirmed) == [(4, 7), (5, 7), (5, 8)]
    unconfirmed.confirm(7)
    assert told(unconfirmed) == [(4, 7), (5, 7), (5, 8)]
    assert unconfirmed.next(4) == steps(7)
    unconfirmed.confirm(7)
    assert told(unconfirmed) == [(5, 7), (5, 8)]


def test_what_is_on_no_step_need_only_be_sent() -> None:
    unconfirmed, remark = Unconfirmed(), Remark("a", "b")
    unconfirmed.add(0, [remark, *steps(3)])
    assert told(unconfirmed) == [(0, remark), (0, 3)]
    assert unconfirmed.next(0) == [remark, *steps(3)]
    assert told(unconfirmed) == [(0, 3)]


def test_many_records_are_in_a_file_and_are_sent_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 10)
    monkeypatch.setattr(module, "CHUNK", 4)
    unconfirmed, numbers = Unconfirmed(), list(range(100))
    for number in numbers[:60]:
        unconfirmed.add(0, steps(number))
    unconfirmed.add(0, steps(*numbers[60:]))
    assert sum(len(chunk.records) for chunk in unconfirmed._chunks) <= 10
    assert unconfirmed._file is not None
    file = unconfirmed._file
    assert [step for _, step in told(unconfirmed)] == numbers
    sent: list[Any] = []
    while batch := unconfirmed.next(0):
        assert len(batch) <= 4
        sent += [getattr(record, "step", None) for record in batch]
        unconfirmed.confirm(len(sent) - 1 - 10)
    assert sent == numbers
    assert 10 <= len(told(unconfirmed)) <= 14
    unconfirmed.confirm(99)
    assert (told(unconfirmed), unconfirmed._held, unconfirmed._file, file.closed) == ([], 0, None, True)
