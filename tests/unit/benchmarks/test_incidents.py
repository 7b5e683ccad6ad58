"""Stall, lost and repeated steps, and survivors, from small tables of who finished what when."""

import pytest

from tests.benchmarks.incidents import Finished, Incident, frontier, incident

KILLED = 3


def steady(steps: range, start: float, pids: tuple[int, ...] = (0, 1, 2, KILLED)) -> list[Finished]:
    """One step per second, each process a millisecond after the one before it."""
    return [Finished(start + n + i / 1000, pid, step) for n, step in enumerate(steps) for i, pid in enumerate(pids)]


def test_survivors_shrink_and_go_on() -> None:
    records = steady(range(10), 0.0) + steady(range(10, 15), 12.0, (0, 1, 2))
    assert incident(records, 9.5, {KILLED}) == Incident(
        killed={KILLED}, stall_s=2.0, step_s=1.0, steps_lost=0, steps_repeated=0, kept=1.0
    )


def test_the_order_of_the_records_does_not_matter() -> None:
    records = steady(range(10), 0.0) + steady(range(10, 15), 12.0, (0, 1, 2))
    assert incident(reversed(records), 9.5, {KILLED}) == incident(records, 9.5, {KILLED})


def test_the_step_in_flight_ends_without_the_killed_worker() -> None:
    """It is no sign that training has gone on: the stall comes after it."""
    records = steady(range(10), 0.0) + steady(range(10, 11), 10.0, (0, 1, 2)) + steady(range(11, 15), 41.0, (0, 1, 2))
    found = incident(records, 9.9, {KILLED})
    assert found.stall_s == pytest.approx(30.0)
    assert found.kept == 1.0


def test_nothing_but_the_step_in_flight() -> None:
    records = steady(range(10), 0.0) + steady(range(10, 11), 10.0, (0, 1, 2))
    found = incident(records, 9.9, {KILLED})
    assert (found.stall_s, found.steps_lost, found.kept) == (None, 0, 0.0)


def test_new_processes_go_back_to_a_checkpoint() -> None:
    """Done by all: 0 to 9. The checkpoint held 0 to 5, so 6 to 9 come again; 10 is the first new one."""
    records = steady(range(10), 0.0) + steady(range(6, 20), 15.0, (10, 11, 12, 13))
    assert incident(records, 9.5, {KILLED}) == Incident(
        killed={KILLED}, stall_s=9.0, step_s=1.0, steps_lost=0, steps_repeated=4, kept=0.0
    )


def test_a_step_that_not_all_had_finished_is_not_repeated() -> None:
    records = [*steady(range(10), 0.0), Finished(10.0, 0, 10), *steady(range(10, 15), 12.0, (0, 1, 2))]
    found = incident(records, 10.5, {KILLED})
    assert (found.steps_lost, found.steps_repeated) == (0, 0)
    assert found.stall_s == pytest.approx(2.0)


def test_a_step_that_only_the_killed_worker_had_finished_is_lost() -> None:
    records = [*steady(range(10), 0.0), Finished(10.0, KILLED, 10), *steady(range(11, 15), 12.0, (0, 1, 2))]
    found = incident(records, 10.5, {KILLED})
    assert (found.steps_lost, found.steps_repeated, found.kept) == (1, 0, 1.0)


def test_a_step_that_others_took_from_the_killed_worker_long_before_is_not_lost() -> None:
    # Step 3 it alone had finished when another died; who was behind took its state.
    records = [*steady(range(3), 0.0), Finished(3.0, KILLED, 3), *steady(range(4, 15), 4.0)]
    assert incident(records, 12.5, {KILLED}).steps_lost == 0


def test_a_survivor_is_replaced() -> None:
    records = steady(range(10), 0.0) + steady(range(10, 15), 12.0, (0, 1, 9))
    assert incident(records, 9.5, {KILLED}).kept == pytest.approx(2 / 3)


def test_workers_of_an_earlier_kill_are_no_survivors_of_this_one() -> None:
    earlier = steady(range(10), 0.0, (90, 91, 92, 93))
    records = earlier + steady(range(6, 20), 15.0) + steady(range(20, 25), 32.0, (0, 1, 2))
    found = incident(records, 28.5, {KILLED})
    assert (found.kept, found.steps_repeated) == (1.0, 0)
    assert found.stall_s == pytest.approx(3.0)


def test_nothing_before_the_kill() -> None:
    with pytest.raises(ValueError, match="before the kill"):
        incident([Finished(2.0, 0, 0)], 1.0, {KILLED})


def test_the_frontier_leaves_out_what_was_done_before() -> None:
    records = [Finished(0.0, 0, 0), Finished(0.1, 1, 0), Finished(1.0, 0, 1), Finished(2.0, 2, 0), Finished(3.0, 2, 2)]
    assert [record.step for record in frontier(records)] == [0, 1, 2]


def test_a_warm_up_step_is_no_repeated_step() -> None:
    records = [*steady(range(10), 0.0), Finished(11.0, 9, 0), *steady(range(10, 15), 12.0, (0, 1, 2))]
    assert incident(records, 9.5, {KILLED}).steps_repeated == 0
