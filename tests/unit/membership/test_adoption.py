"""A new controller takes over the workers of a dead one: nobody that trains is disturbed, and nothing is made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raytrain_plus.membership import events as e
from raytrain_plus.membership.adoption import Survivor, adopt
from raytrain_plus.membership.group_state import Group, Limits, Phase, WorkerStatus
from raytrain_plus.membership.mesh import Shape, Stage
from raytrain_plus.membership.sizes import SizeTable

WHOLE = Stage()
INSIDE = Survivor(node="n", generation=3, joined=True, left=None)


def charter(*seats: str, others: dict[str, WorkerStatus] | None = None, **changes: Any) -> Group:
    """Return a group that was told to form generation 3, from the state after step 4."""
    limits = Limits(sizes=SizeTable(1, 3, 6), spares=0, steps=99, max_failures=None, expected=3)
    workers = {name: WorkerStatus("in", holds=4, stage=WHOLE) for name in seats} | (others or {})
    return Group(
        limits=replace(limits, sizes=SizeTable(1, len(workers), 6)),
        phase=Phase.JOIN,
        generation=3,
        shape=Shape(len(seats)),
        seats=seats,
        workers=workers,
        named=len(workers),
        committed=4,
        **changes,
    )


def out(name: str, holds: int | None, why: e.Why = "interrupted", **changes: Any) -> Survivor:
    return replace(INSIDE, left=e.Left(name, 3, holds, why, stage=WHOLE), **changes)


def taken_over(group: Group, survivors: dict[str, Survivor], **changes: Any) -> tuple[Group, list[e.Command]]:
    return adopt(group, survivors, **{"committed": 9, "durable": 2, "named": 0, **changes})


def test_members_that_train_are_left_alone() -> None:
    group, commands = taken_over(charter("a", "b", "c"), dict.fromkeys("abc", INSIDE), named=5)
    assert (group.phase, group.generation, group.committed, group.durable) == (Phase.TRAIN, 3, 9, 2)
    assert (group.named, group.failures, commands) == (5, 0, [e.Formed()])


def test_a_dead_member_interrupts_those_that_are_inside_and_is_a_failure() -> None:
    group, commands = taken_over(charter("a", "b", "c", kept=4), {"a": INSIDE, "c": out("c", 9)})
    assert (group.phase, group.failures, set(group.workers), group.kept) == (Phase.LEAVE, 1, {"a", "c"}, -1)
    assert commands == [e.Formed(), e.Interrupt(("a",), 3)]


def test_a_member_that_was_not_called_cancels_the_formation_and_counts_as_no_failure() -> None:
    stale = replace(out("b", 7), generation=2)
    group, commands = taken_over(charter("a", "b"), {"a": replace(INSIDE, joined=False), "b": stale}, committed=4)
    assert (group.phase, group.failures, group.unformed) == (Phase.LEAVE, 0, 0)
    assert commands == [e.Interrupt(("a",), 3)]
    # What it held when the controller knew of it counts.
    assert (group.workers["b"].state, group.workers["b"].holds) == ("idle", 4)


def test_a_world_that_forms_is_waited_for() -> None:
    forming = {"a": INSIDE, "b": replace(INSIDE, joined=False)}
    group, commands = taken_over(charter("a", "b"), forming, committed=4)
    assert (group.phase, group.workers["a"].joined, group.workers["b"].joined) == (Phase.JOIN, True, False)
    assert commands == []
    # A step of it proves that all have joined.
    assert taken_over(charter("a", "b"), forming, committed=5)[0].phase is Phase.TRAIN
    # So does a member that came to a boundary.
    assert taken_over(charter("a", "b"), {**forming, "a": out("a", 4, "paused")}, committed=4)[0].phase is Phase.TRAIN


def test_members_that_paused_before_one_was_lost_go_on_without_a_failure() -> None:
    group, commands = taken_over(charter("a", "b", "c"), {name: out(name, 9, "paused") for name in "ac"})
    [join] = [command for command in commands if isinstance(command, e.Join)]
    assert (join.first_step, [member.worker for member in join.view.members]) == (10, ["a", "c"])
    assert group.failures == 0
    assert not any(isinstance(command, e.Interrupt | e.Pause) for command in commands)


def test_a_stop_that_was_requested_forms_no_other_world() -> None:
    survivors = {name: out(name, 9, "paused") for name in "ab"}
    _, commands = taken_over(charter("a", "b"), survivors, requests=[e.Stop()])
    assert commands[-1] == e.HandOver((("a", WHOLE),), 9)


def test_fewer_workers_that_were_requested_are_counted_once_it_is_known_who_lives() -> None:
    requests = [e.Rescale(1, 1, 0)]
    group, commands = taken_over(charter("a", "b"), dict.fromkeys("ab", INSIDE), requests=requests)
    assert (group.phase, group.workers["b"].unwanted, commands[-1]) == (Phase.PAUSE, True, e.Pause(3))
    group, commands = taken_over(charter("a", "b"), {"a": INSIDE}, requests=requests)
    assert not group.workers["a"].leaving


def test_steps_that_are_made_again_count_once_they_are() -> None:
    again = charter("a", "b", again=9)
    survivors = {"a": out("a", 7), "b": out("b", 6)}
    group, [_, *_, join] = taken_over(again, survivors, committed=9)
    assert isinstance(join, e.Join)
    assert (join.first_step, join.again, group.committed) == (8, True, 7)
    assert taken_over(again, dict.fromkeys("ab", INSIDE), committed=12)[0].committed == 12


def test_what_is_held_of_steps_that_the_record_has_undone_does_not_count() -> None:
    survivors = {"a": out("a", 9, copies=frozenset({(8, WHOLE, 3)})), "b": replace(INSIDE, joined=True)}
    group, commands = taken_over(charter("a", "b", finished=True), survivors, committed=2, void_above=2)
    # One that is still inside was to be ended before.
    assert commands[0] == e.Dismiss("b")
    assert e.Restore("a", 2, WHOLE) in commands
    assert (group.committed, group.finished, group.workers["a"].copies) == (2, False, frozenset())


@pytest.mark.parametrize(
    ("known", "holds", "state", "held"),
    [
        (None, -1, "warming_up", None),
        (None, None, "idle", None),
        (WorkerStatus("up"), -1, "warming_up", None),
        (WorkerStatus("idle", holds=-1), -1, "warming_up", None),
        (WorkerStatus("idle", holds=4, stage=WHOLE), 4, "idle", 4),
        (WorkerStatus("idle", holds=None), 4, "idle", None),
    ],
)
def test_a_worker_without_a_seat_holds_what_it_was_known_to_hold(
    known: WorkerStatus | None, holds: int | None, state: str, held: int | None
) -> None:
    fresh = holds != 4
    left = e.Left("s", -1 if fresh else 1, holds, "paused", stage=None if fresh else WHOLE)
    spare = Survivor(node="m", generation=left.generation, joined=False, left=left)
    group = charter("a", others={} if known is None else {"s": known})
    group, commands = taken_over(group, {"a": INSIDE, "s": spare})
    status = group.workers["s"]
    assert (status.state, status.holds, status.node) == (state, held, "m")
    assert (e.WarmUp("s") in commands) == (state == "warming_up")


def test_copies_count_if_they_are_of_this_history() -> None:
    copies = frozenset({(8, WHOLE, 3), (7, WHOLE, 1), (2, WHOLE, 1)})
    spare = replace(out("s", None), generation=1, copies=copies)
    group = charter("a", others={"s": WorkerStatus("idle", copies=frozenset({(2, WHOLE)}))})
    group, _ = taken_over(group, {"a": INSIDE, "s": spare})
    # That of step 7 was forgotten when the run went back.
    assert group.workers["s"].copies == {(8, WHOLE), (2, WHOLE)}


def test_a_worker_whose_end_was_decided_ends() -> None:
    others = {"lost": replace(INSIDE, generation=2), "gone": replace(out("gone", 9), generation=2)}
    group, commands = taken_over(charter("a", others={"lost": WorkerStatus("idle")}), {"a": INSIDE, **others})
    assert commands[:2] == [e.Dismiss("lost"), e.Dismiss("gone")]
    assert "gone" not in group.workers
    assert "lost" not in group.workers


def test_all_that_are_gone_are_replaced_and_a_spare_reads_the_checkpoint() -> None:
    spare = replace(out("s", None), generation=1)
    group, commands = taken_over(charter("a", others={"s": WorkerStatus("idle")}), {"s": spare})
    assert e.Restore("s", 2, WHOLE) in commands
    assert (group.phase, group.committed, "a" in group.workers) == (Phase.GATHER, 2, False)
