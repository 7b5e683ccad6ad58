"""Reports reach the controller at least once, in order, whatever the network does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from raytrain_plus.errors import RunError
from raytrain_plus.workers import reporter as module
from raytrain_plus.workers.reporter import Reporter


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.002)


def test_records_are_sent_in_order_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(module.ray, "get", lambda reference, timeout: None)
    with Reporter(sent.extend) as reporter:
        for number in range(100):
            reporter.tell(number)
    assert [*sent, *reporter.rest()] == list(range(100))


def test_a_batch_that_did_not_arrive_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[Any]] = []
    arrived = threading.Event()

    def send(records: Sequence[Any]) -> None:
        batches.append(list(records))

    def get(reference: Any, timeout: float) -> None:
        if len(batches) == 1:
            raise GetTimeoutError("the controller is out of reach")
        arrived.set()

    monkeypatch.setattr(module.ray, "get", get)
    with Reporter(send) as reporter:
        reporter.tell("a")
        assert arrived.wait(5)
    assert batches == [["a"], ["a"]]
    assert reporter.rest() == []


def test_records_that_never_arrived_are_in_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def get(reference: Any, timeout: float) -> None:
        tried.set()
        raise GetTimeoutError("the controller is out of reach")

    monkeypatch.setattr(module.ray, "get", get)
    with Reporter(lambda records: None) as reporter:
        reporter.tell("a")
        assert tried.wait(5)
    assert reporter.rest() == ["a"]


def test_records_that_the_controller_waits_for_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 60.0)
    monkeypatch.setattr(module.ray, "get", lambda reference, timeout: None)
    arrived = threading.Event()
    with Reporter(lambda records: arrived.set()) as reporter:
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

    with Reporter(send) as reporter:
        reporter.tell("a")
        assert ended.wait(5)
        reporter._thread.join(5)
        with pytest.raises(RunError, match="steps can no longer be reported: TypeError: cannot pickle; please report"):
            reporter.tell("b")
    assert reporter.rest() == ["a"]
