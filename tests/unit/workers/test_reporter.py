"""Reports reach the controller at least once, in order, whatever the network does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from raytrain_plus.errors import RunError
from raytrain_plus.training.exchange.step_records import Evaluated, Remark
from raytrain_plus.workers import reporter as module
from raytrain_plus.workers.reporter import Reporter
from raytrain_plus.workers.unconfirmed import Unconfirmed


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.002)


def reporter_of(send: Callable[[Sequence[Any]], Any], unconfirmed: Unconfirmed | None = None) -> Reporter:
    return Reporter(send, Unconfirmed() if unconfirmed is None else unconfirmed, 0)


def test_records_are_sent_in_order_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(module.ray, "get", lambda reference, timeout: 99)
    with reporter_of(sent.extend) as reporter:
        for number in range(100):
            reporter.tell(number)
    assert [*sent, *reporter.rest()] == list(range(100))


@pytest.mark.parametrize(
    ("error", "calls"), [(GetTimeoutError("late"), 1), (ActorUnavailableError("its node is away", b"0" * 16), 4)]
)
def test_a_batch_that_did_not_arrive_is_sent_again_unless_it_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, calls: int
) -> None:
    batches: list[list[Any]] = []
    tried: list[float] = []
    arrived = threading.Event()

    def send(records: Sequence[Any]) -> object:
        batches.append(list(records))
        return object()

    def get(reference: Any, timeout: float) -> int:
        tried.append(timeout)
        if len(tried) == 1:
            reporter.tell("b")
        if len(tried) <= 3:
            raise error
        arrived.set()
        return 99

    monkeypatch.setattr(module.ray, "get", get)
    with reporter_of(send) as reporter:
        reporter.tell("a")
        assert arrived.wait(5)
    assert batches in ([["a"]] * calls, [*[["a"]] * calls, ["b"]])
    assert (reporter.rest() == ["b"]) == (batches[-1] == ["a"])
    assert len(caplog.records) == 1


def test_what_is_durable_is_forgotten_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = threading.Event()

    def get(reference: Any, timeout: float) -> int:
        arrived.set()
        return 2

    monkeypatch.setattr(module.ray, "get", get)
    unconfirmed, records = Unconfirmed(), [Evaluated(step=step, metrics={}) for step in range(3)]
    unconfirmed.add(7, records[:2])
    unconfirmed.next(7)
    with reporter_of(lambda sent: None, unconfirmed) as reporter:
        reporter.tell(Remark("a", "b"))
        reporter.tell(records[2])
        assert arrived.wait(5)
    assert unconfirmed.all() == [(0, records[2])]


def test_a_controller_that_is_gone_for_good_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def get(reference: Any, timeout: float) -> None:
        raise ActorDiedError()

    monkeypatch.setattr(module.ray, "get", get)
    with reporter_of(lambda records: sent.append(list(records))) as reporter:
        reporter.tell("a")
        reporter._thread.join(5)
        reporter.tell("b")
    assert (sent, reporter.rest()) == ([["a"]], ["a", "b"])


def test_records_that_never_arrived_are_in_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def get(reference: Any, timeout: float) -> None:
        tried.set()
        raise GetTimeoutError("the controller is out of reach")

    monkeypatch.setattr(module.ray, "get", get)
    with reporter_of(lambda records: None) as reporter:
        reporter.tell("a")
        assert tried.wait(5)
    assert reporter.rest() == ["a"]


def test_records_that_the_controller_waits_for_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 60.0)
    monkeypatch.setattr(module.ray, "get", lambda reference, timeout: 99)
    arrived = threading.Event()
    with reporter_of(lambda records: arrived.set()) as reporter:
        reporter.tell("a")
        assert not arrived.wait(0.05)
        reporter.soon()
        assert arrived.wait(5)
    assert reporter.rest() == []


def test_what_ends_the_thread_is_raised_with_the_next_record(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def send(records: Sequence[Any]) -> None:
        ended.set()
        raise TypeError("cannot pickle")

    with reporter_of(send) as reporter:
        reporter.tell("a")
        assert ended.wait(5)
        reporter._thread.join(5)
        with pytest.raises(RunError, match="steps can no longer be reported: TypeError: cannot pickle; please report"):
            reporter.tell("b")
    assert reporter.rest() == ["a"]
