"""The inbox, the timers, and what becomes of calls to workers."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_plus.controller.event_loop import Died, EventLoop, stale
from raytrain_plus.errors import Interrupted, WorkerLost
from raytrain_plus.membership.group_state import Group, Limits
from raytrain_plus.membership.sizes import SizeTable
from tests.unit.controller.fakes import FakeTime, FakeWorkers


class Loop:
    """A loop with one worker, and what was handled."""

    def __init__(self) -> None:
        self.workers, self.time, self.heard = FakeWorkers(), FakeTime(), list[Any]()
        self.it = EventLoop(self.workers, self.time.clock)
        self.it.serve({str: self.heard.append, Died: self.heard.append})
        self.it.start("a")

    def hear(self) -> list[Any]:
        """Handle all that is in the inbox; return what was handled since the last time."""
        while self.it.hear(0):
            continue
        told = list(self.heard)
        self.heard.clear()
        return told


def test_messages_are_handled_in_order_when_their_turn_comes() -> None:
    loop = Loop()
    loop.it.put("one")
    loop.it.put("two")
    assert loop.heard == []
    assert loop.it.hear(0)
    assert loop.heard == ["one"]
    assert loop.hear() == ["one", "two"]
    assert not loop.it.hear(0)


def test_an_answer_is_handled_on_the_loop_and_an_error_by_its_handler() -> None:
    loop = Loop()
    loop.it.ask("a", "m", 1, then=loop.heard.append, failed=loop.heard.append)
    loop.workers.answer("a", "m", "found")
    assert loop.heard == []
    assert loop.hear() == ["found"]
    error = Interrupted("no")
    loop.it.ask("a", "m", 1, then=loop.heard.append, failed=loop.heard.append)
    loop.workers.answer("a", "m", error)
    assert loop.hear() == [error]
    loop.it.ask("a", "m", 1, then=loop.heard.append)
    loop.workers.answer("a", "m", error)
    with pytest.raises(Interrupted):
        loop.hear()


def test_an_error_that_its_handler_does_not_take_ends_the_run() -> None:
    loop = Loop()
    bug, full = ZeroDivisionError("ours"), OSError("full")
    loop.it.ask("a", "m", failed=loop.heard.append)
    loop.workers.answer("a", "m", bug)
    with pytest.raises(ZeroDivisionError):
        loop.hear()
    loop.it.ask("a", "m", failed=loop.heard.append, errors=(OSError, Interrupted))
    loop.workers.answer("a", "m", full)
    assert loop.hear() == [full]
    loop.it.ask("a", "m", failed=loop.heard.append, errors=(OSError, Interrupted))
    loop.workers.answer("a", "m", bug)
    with pytest.raises(ZeroDivisionError):
        loop.hear()


def test_of_a_lost_worker_only_its_death_is_heard_and_that_once() -> None:
    loop = Loop()
    for _ in range(2):
        loop.it.ask("a", "m", then=loop.heard.append, failed=loop.heard.append)
    loop.workers.answer("a", "m", WorkerLost("a died: alone"))
    assert loop.hear() == []
    loop.workers.die("a", "its node is gone")
    assert loop.hear() == [Died("a", "its node is gone")]
    loop.it.end("a")
    loop.it.end("a")
    assert "a" not in loop.it


def test_a_worker_that_was_ended_is_neither_called_nor_heard_of() -> None:
    loop = Loop()
    loop.workers.die("a", "its process was killed or crashed")
    loop.it.end("a")
    assert loop.hear() == []
    assert loop.it.tell("a", "m") is None
    loop.it.ask("a", "m", then=loop.heard.append)
    assert loop.workers.take() == []


def test_timers_fire_once_when_they_are_due() -> None:
    loop = Loop()
    loop.it.later(2.0, lambda: loop.heard.append("late"))
    loop.it.later(1.0, lambda: loop.heard.append("early"))
    loop.it.fire(loop.time.now + 1.5)
    assert loop.heard == ["early"]
    loop.it.fire(loop.time.now + 2.5)
    loop.it.fire(loop.time.now + 3.5)
    assert loop.heard == ["early", "late"]


def test_a_message_of_another_generation_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(sizes=SizeTable(1, 1, 1), spares=0, steps=1, max_failures=None, expected=1)
    group = Group(limits=limits, generation=3)
    assert not stale(group, 3, "a report from worker-1")
    assert stale(group, 2, "a report from worker-1")
    assert caplog.messages == ["refused: a report from worker-1 in generation 2; the current one is 3"]
