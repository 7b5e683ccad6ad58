"""Which workers hang, and which do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain_plus.membership.hang_detection import (
    LAST_S,
    LEAVE_JOINING_S,
    LEAVE_S,
    LEAVE_UNRESPONSIVE_S,
    Pulse,
    Pulses,
    judge,
    overdue,
    unresponsive,
)

NOW = 1000.0
HANG_S = 30.0


def pulse(doing: str, for_s: float, limit_s: float = HANG_S, unresponsive_s: float = 0.0) -> Pulse:
    return Pulse(
        doing=doing,
        since=NOW - unresponsive_s - for_s,
        limit_s=limit_s,
        heard=NOW - unresponsive_s,
        asked=NOW - unresponsive_s if unresponsive_s else None,
    )


WAITS = pulse("collective", 100.0)


@pytest.mark.parametrize(
    ("culprit", "word"),
    [
        (pulse("computing", 1.0, unresponsive_s=30.1), "not answered"),
        (pulse("collective", 1.0, unresponsive_s=30.1), "not answered"),
        (pulse("computing", 30.1), "while it computed"),
        (pulse("applying", 30.1), "while it applied"),
        (pulse("data", 30.1), "while it waited for data"),
        (pulse("computing", 300.1, limit_s=300.0), "while it computed"),
        (pulse("preparing", 601.0, limit_s=600.0), "while it prepared"),
    ],
)
def test_the_worker_that_does_not_wait_has_hung(culprit: Pulse, word: str) -> None:
    verdict = judge({"a": WAITS, "b": culprit, "c": WAITS}, ["a", "b", "c"], [["a", "b", "c"]], HANG_S, NOW)
    assert list(verdict.hung) == ["b"]
    assert word in verdict.hung["b"]
    assert not verdict.stuck


@pytest.mark.parametrize(
    "healthy",
    [
        pulse("computing", 0.8 * HANG_S),
        pulse("computing", 200.0, limit_s=300.0),
        pulse("computing", 1.0, limit_s=300.0, unresponsive_s=200.0),
        pulse("preparing", 500.0, limit_s=600.0, unresponsive_s=400.0),
        pulse("collective", 29.0),
        pulse("idle", 5000.0),
        pulse("joining", 100.0),
    ],
)
def test_slow_is_not_hung(healthy: Pulse) -> None:
    verdict = judge({"a": WAITS, "b": healthy}, ["a", "b"], [["a", "b"]], HANG_S, NOW)
    assert verdict.hung == {}
    assert not verdict.stuck


def test_all_inside_a_collective_are_stuck() -> None:
    assert judge({"a": WAITS, "b": WAITS, "spare": pulse("idle", 1)}, ["a", "b"], [["a", "b"]], HANG_S, NOW).stuck
    assert not judge({"a": WAITS}, ["a", "b"], [["a", "b"]], HANG_S, NOW).stuck
    assert not judge({"a": WAITS}, [], [[]], HANG_S, NOW).stuck


def test_a_worker_that_does_not_leave_its_world_at_a_boundary_is_stuck() -> None:
    assert judge({"a": pulse("leaving", 31.0), "b": pulse("idle", 31.0)}, ["a"], [["a", "b"]], HANG_S, NOW).stuck


def test_all_holders_of_the_state_hang_only_after_more_time() -> None:
    long = {name: pulse("computing", HANG_S + 1) for name in "ab"}
    assert judge(long, ["a", "b"], [["a", "b"]], HANG_S, NOW).hung == {}
    assert list(judge(long, ["a", "b"], [["a", "b", "c"]], HANG_S, NOW).hung) == ["a", "b"]
    longer = {name: pulse("computing", HANG_S + LAST_S + 1) for name in "ab"}
    assert list(judge(longer, ["a", "b"], [["a", "b"]], HANG_S, NOW).hung) == ["a", "b"]
    quiet = {name: pulse("collective", 1.0, unresponsive_s=HANG_S + 1) for name in "ab"}
    assert judge(quiet, ["a", "b"], [["a", "b"]], HANG_S, NOW).hung == {}


def test_missing_answers_of_all_holders_may_be_our_own_fault() -> None:
    quiet = {name: pulse("computing", 1.0, unresponsive_s=4.0) for name in "ab"}
    assert unresponsive(quiet, [["a", "b", "c"]], 3.0, NOW) == ["a", "b"]
    assert unresponsive(quiet, [[]], 3.0, NOW) == ["a", "b"]
    assert unresponsive(quiet, [["a", "b"]], 3.0, NOW) == []
    assert unresponsive(quiet, [["a"]], 4.0, NOW) == []
    longer = {name: pulse("computing", 1.0, unresponsive_s=3.0 + LAST_S + 0.1) for name in "ab"}
    assert unresponsive(longer, [["a", "b"]], 3.0, NOW) == ["a", "b"]


def test_only_the_duration_at_the_last_answer_counts() -> None:
    heard = Pulse(doing="computing", since=NOW - 45, limit_s=HANG_S, heard=NOW - 20)
    assert judge({"a": heard}, ["a"], [["a", "b"]], HANG_S, NOW).hung == {}


def test_an_interrupted_worker_has_time_if_it_computes_and_none_if_it_waits() -> None:
    told = NOW - 2 * LEAVE_S
    inside = Pulse(doing="collective", heard=NOW, told=told)
    assert overdue({"a": inside}, NOW, [["a", "b"]]) == ["a"]
    assert overdue({"a": replace(inside, heard=told + LEAVE_S / 2)}, NOW, [["a", "b"]]) == []
    assert overdue({"a": replace(inside, doing="computing")}, NOW, [["a", "b"]]) == []
    assert overdue({"a": replace(inside, told=None)}, NOW, [["a", "b"]]) == []
    quiet = Pulse(doing="collective", heard=NOW - 5, asked=NOW - 2, told=NOW - LEAVE_UNRESPONSIVE_S - 0.1)
    assert overdue({"a": quiet}, NOW, [["a", "b"]]) == ["a"]


def test_a_worker_that_just_stopped_computing_gets_the_full_time_to_leave() -> None:
    leaves = Pulse(doing="leaving", since=NOW - 0.05, heard=NOW, told=NOW - 3)
    assert overdue({"a": leaves}, NOW, [["a", "b"]]) == []
    assert overdue({"a": replace(leaves, since=NOW - 2 * LEAVE_S)}, NOW, [["a", "b"]]) == ["a"]


def test_a_formation_may_take_longer_to_leave() -> None:
    joining = Pulse(doing="joining", heard=NOW, told=NOW - 2 * LEAVE_S)
    assert overdue({"a": joining}, NOW, [["a", "b"]]) == []
    assert overdue({"a": replace(joining, told=NOW - LEAVE_JOINING_S - 0.1)}, NOW, [["a", "b"]]) == ["a"]


def test_all_holders_of_the_state_are_not_given_up_at_once() -> None:
    late = {name: Pulse(doing="collective", heard=NOW, told=NOW - 1) for name in "ab"}
    assert overdue(late, NOW, [["a", "b", "c"]]) == ["a", "b"]
    assert overdue(late, NOW, [["a", "b"]]) == []
    assert overdue({**late, "b": replace(late["b"], doing="idle")}, NOW, [["a", "b"]]) == ["a"]
    lost = {name: replace(pulse, told=NOW - LAST_S - 0.1) for name, pulse in late.items()}
    assert overdue(lost, NOW, [["a", "b"]]) == ["a", "b"]


def test_questions_and_answers() -> None:
    pulses = Pulses()
    pulses.add("a", 10.0)
    assert pulses.due(["a", "b"], 0.5, 10.4) == []
    assert pulses.due(["a", "b"], 0.5, 10.5) == ["a"]
    pulses.asked("a", 10.5)
    pulses.asked("a", 11.0)
    assert pulses.all["a"].unresponsive_s(12.0) == 1.5
    assert pulses.due(["a"], 0.5, 12.0) == []
    pulses.on_pulse("a", 12.0)
    pulses.heard("a", "computing", 2.0, 30.0, 12.5)
    assert pulses.all["a"] == Pulse(doing="computing", since=10.5, limit_s=30.0, heard=12.5, told=12.0)
    pulses.left("a", 13.0)
    assert (pulses.all["a"].doing, pulses.all["a"].told) == ("idle", None)
    pulses.drop("a")
    pulses.heard("a", "computing", 0.0, 30.0, 14.0)
    assert pulses.all == {}


def test_no_worker_is_blamed_for_a_pause_of_the_controller() -> None:
    pulses = Pulses()
    pulses.add("a", 0.0)
    pulses.heard("a", "computing", 0.0, 30.0, 0.0)
    pulses.asked("a", 1.0)
    pulses.on_pulse("a", 1.0)
    pulses.forgive(100.0)
    assert judge(pulses.all, ["a"], [["a", "b"]], 30.0, 125.0).hung == {}
    assert overdue(pulses.all, 101.1, [["a", "b"]]) == []


def test_the_only_holder_of_a_stage_has_longer() -> None:
    told = NOW - 1.0
    late = pulse("collective", 5.0)
    late = replace(late, told=told, heard=told + 2 * LEAVE_S)
    replicas = [["a0", "b0"], ["a1", "b1"]]
    assert overdue({"a0": late}, NOW, replicas) == ["a0"]
    # Its stage's state is in nobody else's memory.
    assert overdue({"a0": late}, NOW, [["a0"], ["a1", "b1"]]) == []
    assert overdue({"a0": late, "a1": late}, NOW, [["a0"], ["a1", "b1"]]) == ["a1"]
