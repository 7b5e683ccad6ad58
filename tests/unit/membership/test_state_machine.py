"""The group's machine: every pair of phase and event, every order of events in small worlds, and ten broken tables."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest

from raytrain_plus.membership import events as e
from raytrain_plus.membership import state_machine
from raytrain_plus.membership.group_state import (
    Group,
    Limits,
    NewestState,
    Phase,
    WorkerStatus,
    members_in,
    newest_state,
)
from raytrain_plus.membership.mesh import Donor, Shape, Stage
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.membership.state_machine import TABLE, Rule, begin, diagram, step
from tests.unit.membership.explorer import Violation, World, explore, first_world, mark, wander

G, J, T, P, L, C, E = Phase
WHOLE = Stage()
left = partial(e.Left, stage=WHOLE)
LIMITS = Limits(sizes=SizeTable(1, 2, 2), spares=0, steps=4, max_failures=None, expected=2)


def halves(front: str, back: str) -> tuple[Donor, ...]:
    """Return two donors that each have a stage of two."""
    return (front, Stage(0, 2)), (back, Stage(1, 2))


def group_in(phase: Phase) -> Group:
    """Return two workers after step 1, as they are in `phase`; events concern `a`."""
    inside = WorkerStatus("in", holds=1, stage=WHOLE, joined=phase in (T, P))
    workers = {
        G: {"a": WorkerStatus("up"), "b": WorkerStatus("coming")},
        J: {"a": replace(inside, joined=False), "b": replace(inside, joined=True)},
        T: {"a": inside, "b": inside},
        P: {"a": inside, "b": inside},
        L: {"a": inside, "b": WorkerStatus("idle", holds=1, stage=WHOLE)},
        C: {"a": WorkerStatus("idle", holds=3, stage=WHOLE), "b": WorkerStatus("idle", holds=3, stage=WHOLE)},
        E: {"a": WorkerStatus("idle", holds=3, stage=WHOLE)},
    }[phase]
    started = phase is not G
    workers["a"] = replace(workers["a"], copies=frozenset({(0, WHOLE)} if started else ()))
    return Group(
        limits=LIMITS,
        phase=phase,
        generation=0 if started else -1,
        shape=Shape(2) if started else Shape(1),
        seats=("a", "b") if started else (),
        workers=workers,
        named=2,
        committed=1 if started else -1,
        leads=(("a", WHOLE),) if phase is C else (),
        finished=phase is C,
        ended_at=3 if phase is C else -1,
    )


def event_of(kind: type[Any], generation: int, **changes: Any) -> e.Event:
    about: dict[str, Any] = {
        "worker": "a",
        "generation": generation,
        "holds": 1 if generation >= 0 else -1,
        "why": "paused",
        "stage": WHOLE if generation >= 0 else None,
        "step": 2,
        "durable": -1,
        "copies": {"a": (WHOLE,)},
        "minimum": 1,
        "maximum": 1,
        "spares": 0,
        "stage_counts": (2,),
        "parts": {},
        **changes,
    }
    names = [name for name in kind.__dataclass_fields__ if name in about]
    event: e.Event = kind(**{name: about[name] for name in names})
    return event


Seen = tuple[Phase, list[str], dict[str, Any]]
"""The phase after an event, the commands, and all other changes.

A field of the group is given by its name, one of a worker as "a.leaving"; a worker by its name, with its state if it is
new and None if it is gone.
"""


def seen(before: Group, event: e.Event) -> Seen:
    after, commands = step(before, event)
    names = [field.name for field in fields(Group) if field.name not in ("phase", "workers")]
    found = {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}
    for worker in (*before.workers, *(name for name in after.workers if name not in before.workers)):
        old, new = before.workers.get(worker), after.workers.get(worker)
        if old is None or new is None:
            found[worker] = new and new.state
            continue
        for name in (field.name for field in fields(WorkerStatus)):
            if getattr(old, name) != getattr(new, name):
                found[f"{worker}.{name}"] = getattr(new, name)
    return after.phase, [type(command).__name__ for command in commands], found


FEWER = {"limits": replace(LIMITS, sizes=SizeTable(1, 1, 2), spares=0)}
FAILED = {"failures": 1, "fruitless": 1, "fruitless_at": 1}
STUCK = "all workers waited for one another in step 2, twice: the collective makes no progress"

EXPECTED: dict[tuple[Phase, type[Any]], Seen] = {
    (G, e.Ready): (G, ["Wait"], {"a.state": "idle", "a.holds": -1}),
    (G, e.Lost): (G, ["Start", "Wait"], {"named": 3, "stillborn": 1, "a": None, "worker-2": "coming"}),
    (G, e.Notice): (G, ["Start", "Wait"], {"named": 3, "a.leaving": True, "worker-2": "coming"}),
    (G, e.Rescale): (G, ["Dismiss", "Wait"], {**FEWER, "b": None}),
    (G, e.Stop): (E, ["End"], {"stopping": True}),
    (G, e.Fitted): (G, [], {"limits": replace(LIMITS, sizes=SizeTable(1, 2, 2, (2,)))}),
    (G, e.Late): (E, ["End"], {"failure": "only 0 of at least 1 worker were available within elastic.wait_s"}),
    (J, e.Joined): (T, ["Formed"], {"a.joined": True, "a.proved": True, "b.proved": True}),
    (J, e.Committed): (T, ["Formed"], {"committed": 2, "a.proved": True, "b.proved": True}),
    (J, e.Left): (J, [], {"a.state": "idle"}),
    (J, e.Lost): (L, ["Interrupt"], {**FAILED, "unformed": 1, "a": None}),
    (J, e.Notice): (J, [], {"a.leaving": True}),
    (J, e.Stop): (J, [], {"stopping": True}),
    (J, e.Late): (L, ["Interrupt"], {**FAILED, "unformed": 1, "cause": f"{J.value} took too long"}),
    (T, e.Committed): (T, [], {"committed": 2}),
    (T, e.Left): (T, [], {"a.state": "idle", "a.joined": False}),
    (T, e.Lost): (L, ["Interrupt"], {**FAILED, "a": None}),
    (T, e.Notice): (P, ["Start", "Pause"], {"named": 3, "a.leaving": True, "worker-2": "coming"}),
    (T, e.Rescale): (P, ["Pause"], {**FEWER, "b.leaving": True, "b.unwanted": True}),
    (T, e.Stop): (P, ["Pause"], {"stopping": True}),
    (T, e.Stuck): (L, ["Interrupt"], {**FAILED, "faults": ((2, STUCK, 0),), "cause": STUCK.partition(" in step")[0]}),
    (P, e.Committed): (P, [], {"committed": 2}),
    (P, e.Left): (P, [], {"a.state": "idle", "a.joined": False}),
    (P, e.Lost): (L, ["Interrupt"], {**FAILED, "a": None}),
    (P, e.Notice): (P, [], {"a.leaving": True}),
    (P, e.Stop): (P, [], {"stopping": True}),
    (P, e.Late): (L, ["Interrupt"], {**FAILED, "cause": f"{P.value} took too long"}),
    (P, e.Stuck): (L, ["Interrupt"], {**FAILED, "faults": ((2, STUCK, 0),), "cause": STUCK.partition(" in step")[0]}),
    (L, e.Committed): (L, [], {"committed": 2}),
    (L, e.Left): (J, ["Join"], {"generation": 1, "b.state": "in"}),
    (L, e.Lost): (J, ["Join"], {"generation": 1, "shape": Shape(1), "seats": ("b",), "a": None, "b.state": "in"}),
    (L, e.Notice): (L, [], {"a.leaving": True}),
    (L, e.Stop): (L, [], {"stopping": True}),
    (L, e.Late): (
        J,
        ["Dismiss", "Join"],
        {"generation": 1, "shape": Shape(1), "seats": ("b",), "a": None, "b.state": "in"},
    ),
    (C, e.Committed): (C, [], {"committed": 2}),
    (C, e.Rescale): (C, [], FEWER),
    (C, e.Stop): (C, [], {"stopping": True}),
    (C, e.Lost): (C, ["HandOver"], {"leads": (("b", WHOLE),), "a": None}),
    (C, e.Notice): (C, [], {"a.leaving": True}),
    (C, e.Late): (E, ["End"], {}),
    (C, e.Handed): (E, ["End"], {}),
    (C, e.Overwritten): (C, [], {"a.state": "restoring", "a.holds": None, "a.stage": None}),
    **{(phase, e.Rescale): (phase, [], {**FEWER, "b.leaving": True, "b.unwanted": True}) for phase in (J, P, L)},
    **{(phase, e.Saved): (phase, [], {"durable": 2}) for phase in (J, T, P, L, C)},
    (G, e.Saved): (G, ["Wait"], {"committed": 2, "durable": 2}),
    **{(phase, e.CopyMissing): (phase, [], {"a.copies": frozenset()}) for phase in (J, T, P, L, C)},
    **{(phase, e.Copied): (phase, [], {"a.copies": frozenset({(2, WHOLE)})}) for phase in (J, T, P, L)},
}
"""The effects of an event on the group of `group_in`; pairs that are not here change nothing."""


@pytest.mark.parametrize("kind", [kind for kind in get_args(e.Event) if kind is not e.Unreadable])
@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_a_rule_for_every_event(phase: Phase, kind: type[Any]) -> None:
    before = group_in(phase)
    found = seen(before, event_of(kind, before.generation))
    assert found == EXPECTED.get((phase, kind), (phase, [], {}))
    assert found[0] in TABLE[phase, kind].leads


OUTSIDE: dict[tuple[type[Any], str], dict[Phase, Seen]] = {
    (e.Up, "coming"): {phase: (phase, [], {"new.state": "up"}) for phase in (G, J, T, P, L, C)},
    (e.Ready, "up"): {
        G: (G, ["Wait"], {"new.state": "idle", "new.holds": -1}),
        T: (T, ["WarmUp"], {"new.state": "warming_up"}),
        **{phase: (phase, [], {"new.state": "idle", "new.holds": -1}) for phase in (J, P, L, C)},
    },
    (e.Ready, "warming_up"): {
        G: (G, ["Wait"], {"new.state": "idle"}),
        **{phase: (phase, [], {"new.state": "idle"}) for phase in (J, T, P, L, C)},
    },
    (e.Ready, "restoring"): {
        G: (G, ["Wait"], {"new.state": "idle", "new.holds": 1}),
        **{phase: (phase, [], {"new.state": "idle", "new.holds": 1}) for phase in (J, T, P, L, C)},
    },
    (e.Unreadable, "restoring"): {
        G: (G, ["Wait"], {"new.state": "idle", "new.stage": None}),
        **{phase: (phase, [], {"new.state": "idle", "new.stage": None}) for phase in (J, T, P, L, C)},
    },
    (e.Notice, "up"): {
        G: (G, ["Wait"], {"new.leaving": True}),
        **{phase: (phase, [], {"new.leaving": True}) for phase in (J, T, P, L, C)},
    },
    (e.Notice, "idle"): {
        G: (G, ["Wait"], {"new.leaving": True}),
        T: (T, ["Dismiss"], {"new": None}),
        **{phase: (phase, [], {"new.leaving": True}) for phase in (J, P, L, C)},
    },
    (e.Lost, "up"): {
        G: (G, ["Wait"], {"stillborn": 1, "new": None}),
        C: (C, [], {"new": None}),
        **{phase: (phase, [], {"stillborn": 1, "new": None}) for phase in (J, T, P, L)},
    },
    (e.Lost, "idle"): {
        G: (G, ["Wait"], {"new": None}),
        **{phase: (phase, [], {"new": None}) for phase in (J, T, P, L, C)},
    },
}
"""The effects of an event about a third worker `new` in this state; phases that are not here change nothing."""


@pytest.mark.parametrize(("kind", "state"), OUTSIDE)
@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_a_rule_for_what_happens_outside_the_world(phase: Phase, kind: type[Any], state: Any) -> None:
    before = group_in(phase)
    stage = WHOLE if state == "restoring" else None
    before = replace(before, workers={**before.workers, "new": WorkerStatus(state, stage=stage)})
    held = {"up": -1, "restoring": 1}.get(state)
    found = seen(before, event_of(kind, before.generation, worker="new", holds=held, stage=stage))
    assert found == OUTSIDE[kind, state].get(phase, (phase, [], {}))
    assert found[0] in TABLE[phase, kind].leads


def test_every_acting_rule_is_covered() -> None:
    acting = {pair for pair, rule in TABLE.items() if rule.act is not state_machine._nothing}
    # A late training phase counts if a member is to leave, and no copies exist before any world: separate tests cover
    # these.
    seen_acting = {
        (T, e.Late),
        (G, e.CopyMissing),
        *EXPECTED,
        *((phase, kind) for kind, state in OUTSIDE for phase in OUTSIDE[kind, state]),
    }
    assert acting == seen_acting


@pytest.mark.parametrize("phase", [J, T, P, L, C, E])
@pytest.mark.parametrize("kind", [e.Joined, e.Committed, e.Left, e.Late, e.Stuck, e.Copied])
def test_messages_of_another_generation_have_no_effect(phase: Phase, kind: type[Any]) -> None:
    before = group_in(phase)
    for generation in (-1, 1, 7):
        assert step(before, event_of(kind, generation)) == (before, [])


def test_a_run_without_incident() -> None:
    group, commands = begin(LIMITS)
    assert commands == [e.Start(("worker-0", "worker-1"), 0.0)]
    group, commands = step(group, e.Ready("worker-0", -1))
    assert group.phase is G
    group, [join] = step(group, e.Ready("worker-1", -1))
    assert isinstance(join, e.Join)
    assert join.first_step == 0
    assert join.lacks == {}
    for name in ("worker-0", "worker-1"):
        group, _ = step(group, e.Joined(name, 0))
    assert group.phase is T
    group, _ = step(group, left("worker-0", 0, 3, "finished"))
    group, commands = step(group, left("worker-1", 0, 3, "finished"))
    assert commands == [e.HandOver((("worker-0", WHOLE),), 3)]
    group, commands = step(group, e.Handed())
    assert commands == [e.End("finished", "")]


def test_the_most_advanced_survivor_is_the_donor_and_a_partially_applied_one_copies() -> None:
    limits = replace(LIMITS, sizes=SizeTable(1, 3, 3))
    inside = WorkerStatus("in", holds=1, stage=WHOLE, joined=True)
    group = replace(
        group_in(T),
        limits=limits,
        shape=Shape(4),
        seats=("a", "b", "c", "d"),
        workers=dict.fromkeys(("a", "b", "c", "d"), inside),
    )
    group, _ = step(group, e.Lost("d"))
    group, _ = step(group, left("a", 0, 1, "interrupted"))
    group, _ = step(group, left("b", 0, None, "interrupted"))
    group, [join] = step(group, left("c", 0, 2, "interrupted"))
    assert isinstance(join, e.Join)
    assert (join.donors, join.first_step, join.lacks) == ((("c", WHOLE),), 3, {"a": "newer", "b": "newer"})
    assert group.committed == 2


def test_the_same_error_at_the_same_step_twice_ends_the_run() -> None:
    group = group_in(T)
    for generation in (0, 1):
        group, _ = step(group, left("a", generation, None, "failed", "ValueError: no"))
        group, commands = step(group, left("b", generation, 1, "interrupted"))
        if generation == 0:
            assert [type(command) for command in commands] == [e.Join]
    assert commands == [e.HandOver((("b", WHOLE),), 1)]
    group, commands = step(group, e.Handed())
    assert commands == [e.End("failed", "ValueError: no")]


def test_memory_that_runs_out_again_replaces_the_worker_and_then_ends_the_run() -> None:
    group, fault = group_in(T), "OutOfMemoryError at task.py:7"

    def exhausted(group: Group, names: tuple[str, ...]) -> tuple[Group, list[e.Command]]:
        for name in names:
            told = left(name, group.generation, 1, "failed", fault)
            group, commands = step(group, replace(told, exhausted=True))
        for name in members_in(group):
            group, commands = step(group, left(name, group.generation, 1, "interrupted"))
        return group, commands

    group, commands = exhausted(group, ("a",))
    assert [type(command) for command in commands] == [e.Join]
    group, commands = exhausted(group, ("a",))
    # The other worker continues alone until a new process takes the place.
    assert not group.failure
    assert group.seats == ("b",)
    group, commands = step(group, e.Joined("b", group.generation))
    assert [type(command) for command in commands] == [e.Formed, e.Dismiss, e.Start]
    group, commands = exhausted(group, ("b",))
    assert group.failure == fault


@pytest.mark.parametrize("members", [("a", "b"), ("a",)])
def test_memory_that_runs_out_on_all_workers_again_ends_the_run(members: tuple[str, ...]) -> None:
    group, fault = group_in(T), "OutOfMemoryError at task.py:7"
    workers = {name: group.workers[name] for name in members}
    group = replace(group, seats=members, workers=workers, shape=Shape(len(members)))
    for _ in range(2):
        assert not group.failure
        for name in members:
            told = left(name, group.generation, 1, "failed", fault)
            group, _ = step(group, replace(told, exhausted=True))
    assert group.failure == fault


def test_another_error_or_another_step_is_retried() -> None:
    group = group_in(T)
    for generation, fault in enumerate(("ValueError: no", "KeyError: x", "OSError: disk")):
        group, _ = step(group, left("a", generation, None, "failed", fault))
        group, commands = step(group, left("b", generation, 1, "interrupted"))
        assert [type(command) for command in commands] == [e.Join]


def test_a_second_lack_of_memory_with_as_many_members_ends_the_run() -> None:
    def starved(group: Group) -> tuple[Group, list[e.Command]]:
        group, _ = step(group, e.Lost("a", "out of memory", starved=True))
        return step(group, left("b", group.generation, group.committed, "interrupted"))

    def again(group: Group, members: tuple[str, ...], committed: int) -> Group:
        fresh = group_in(T)
        workers = {name: fresh.workers[name] for name in members}
        return replace(
            fresh,
            generation=group.generation + 1,
            seats=members,
            workers=workers,
            committed=committed,
            starved=group.starved,
        )

    first, commands = starved(group_in(T))
    assert [type(command) for command in commands] == [e.Join]
    # With another number of members, and much later, it is not the same.
    alone, _ = starved(again(first, ("a",), 1))
    assert not alone.failure
    assert not starved(again(alone, ("a", "b"), 150))[0].failure
    ended, commands = starved(again(alone, ("a", "b"), 50))
    assert ended.failure.startswith("memory ran out twice with 2 workers: use more parallel.microbatches")
    assert commands == [e.HandOver((("b", WHOLE),), 50)]


def test_failures_are_bounded() -> None:
    group = replace(group_in(T), limits=replace(LIMITS, max_failures=0))
    group, _ = step(group, e.Lost("a"))
    group, commands = step(group, left("b", 0, 1, "interrupted"))
    assert group.failure == "more failures than elastic.max_failures = 0"
    assert commands == [e.HandOver((("b", WHOLE),), 1)]


def test_a_size_that_makes_no_step_faster_is_not_formed() -> None:
    limits = Limits(sizes=SizeTable(1, 5, 12), spares=0, steps=4, max_failures=None, expected=4)
    workers = {f"w{index}": WorkerStatus("in", holds=1, joined=True) for index in range(4)}
    group = replace(
        group_in(T), limits=limits, shape=Shape(4), seats=tuple(workers), workers={**workers, "new": WorkerStatus("up")}
    )
    # 12 shards on 4 are 3 each and on 5 still 3 for some.
    group, commands = step(group, e.Ready("new", None))
    assert (group.phase, commands) == (T, [])


def test_spares_are_held_back_from_growth_and_take_a_lost_ones_place() -> None:
    limits = Limits(sizes=SizeTable(2, 8, 8), spares=1, steps=4, max_failures=None, expected=4)
    group, _ = begin(limits)
    for number in range(4):
        assert group.phase is G
        group, commands = step(group, e.Ready(f"worker-{number}", -1))
    [join] = [command for command in commands if isinstance(command, e.Join)]
    assert [member.worker for member in join.view.members] == ["worker-0", "worker-1", "worker-2"]
    group, _ = step(group, e.Committed(0, 0))
    group, _ = step(group, e.Ready("worker-3", None))
    assert group.phase is T
    group, _ = step(group, e.Lost("worker-1"))
    group, _ = step(group, left("worker-0", 0, 1, "interrupted"))
    group, [join] = step(group, left("worker-2", 0, 1, "interrupted"))
    assert isinstance(join, e.Join)
    assert [member.worker for member in join.view.members] == ["worker-0", "worker-3", "worker-2"]
    group, _ = step(group, e.Committed(1, 2))
    # The next one to start is a spare again, and the one after that makes the group grow.
    group, _ = step(group, e.Ready("worker-4", None))
    assert group.phase is T
    group, commands = step(group, e.Ready("worker-5", None))
    assert (group.phase, commands) == (P, [e.Pause(1)])


def test_unmet_requests_stop_nobody_and_end_when_fewer_are_wanted() -> None:
    limits = Limits(sizes=SizeTable(1, 3, 3), spares=1, steps=4, max_failures=None, expected=1)
    group, [start] = begin(limits)
    assert start == e.Start(("worker-0", "worker-1", "worker-2", "worker-3"), 0.0)
    for event in (e.Ready("worker-0", -1), e.Committed(0, 0), e.Up("worker-1")):
        group, _ = step(group, event)
    assert (group.phase, group.seats) == (T, ("worker-0",))
    group, commands = step(group, e.Rescale(1, 2, 0))
    assert commands == [e.Dismiss("worker-3"), e.Dismiss("worker-2")]
    group, commands = step(group, e.Rescale(1, 1, 0))
    assert commands == [e.Dismiss("worker-1")]
    assert (group.phase, set(group.workers)) == (T, {"worker-0"})


def test_a_member_becomes_a_spare_if_fewer_members_and_more_spares_are_wanted() -> None:
    limits = Limits(sizes=SizeTable(1, 2, 2), spares=0, steps=9, max_failures=None, expected=2)
    group, _ = begin(limits)
    for event in (e.Ready("worker-0", -1), e.Ready("worker-1", -1), e.Committed(0, 0)):
        group, _ = step(group, event)
    assert (group.phase, group.seats) == (T, ("worker-0", "worker-1"))
    group, commands = step(group, e.Rescale(1, 1, 1))
    assert (group.phase, commands) == (P, [e.Pause(0)])
    for name in group.seats:
        group, commands = step(group, left(name, 0, 1, "paused"))
    [join] = commands
    assert isinstance(join, e.Join)
    assert [member.worker for member in join.view.members] == ["worker-0"]
    assert set(group.workers) == {"worker-0", "worker-1"}
    group, _ = step(group, e.Committed(1, 2))
    group, commands = step(group, e.Rescale(1, 2, 0))
    assert (group.phase, commands) == (P, [e.Pause(1)])


def test_workers_are_requested_in_numbers_that_can_be_formed() -> None:
    # 4 shards take as long on 3 replicas as on 2; and 7 workers do not make a second replica of 4 stages.
    for maximum, counts, spares, asked in ((3, (1,), 0, 2), (4, (1,), 0, 4), (7, (4,), 0, 4), (8, (4,), 1, 9)):
        limits = Limits(
            sizes=SizeTable(1, maximum, 4, counts),
            spares=spares,
            steps=4,
            max_failures=None,
            expected=1,
        )
        _, [start] = begin(limits)
        assert isinstance(start, e.Start)
        assert len(start.workers) == asked


def test_survivors_continue_without_a_newcomer_that_still_prepares() -> None:
    group = group_in(T)
    group = replace(group, workers={**group.workers, "new": WorkerStatus("up")})
    group, _ = step(group, e.Lost("a"))
    group, [join] = step(group, left("b", 0, 1, "interrupted"))
    assert isinstance(join, e.Join)
    assert [member.worker for member in join.view.members] == ["b"]


def test_workers_that_waited_for_one_that_is_lost_join_without_it() -> None:
    limits = Limits(sizes=SizeTable(1, 4, 12), spares=0, steps=4, max_failures=None, expected=2)
    group = group_in(T)
    others = {"c": WorkerStatus("idle"), "d": WorkerStatus("up")}
    group = replace(group, limits=limits, workers={**group.workers, **others})
    group, commands = step(group, e.Lost("d"))
    assert (group.phase, commands[-1]) == (P, e.Pause(0))


def test_a_newcomer_with_which_no_world_forms_is_dismissed() -> None:
    limits = Limits(sizes=SizeTable(1, 3, 3), spares=0, steps=4, max_failures=None, expected=2)
    proved = WorkerStatus("in", holds=1, stage=WHOLE, proved=True)
    workers = {"a": proved, "b": proved, "new": WorkerStatus("in", holds=None)}
    group = replace(group_in(J), limits=limits, shape=Shape(3), seats=("a", "b", "new"), workers=workers)
    for generation in (0, 1):
        group, _ = step(group, e.Late(generation))
        for name in ("a", "b"):
            group, _ = step(group, left(name, generation, 1, "interrupted"))
        group, [join] = step(group, left("new", generation, None, "interrupted"))
        assert isinstance(join, e.Join)
        assert ("new" in {member.worker for member in join.view.members}) == (generation == 0)
    for name in ("a", "b"):
        group, commands = step(group, e.Joined(name, 2))
    assert e.Dismiss("new") in commands
    assert [type(command) for command in commands if not isinstance(command, e.Dismiss)] == [e.Formed, e.Start]


def test_a_first_world_that_does_not_form_has_no_suspects() -> None:
    group = group_in(J)
    for generation in (0, 1):
        group, _ = step(group, e.Late(generation))
        group, _ = step(group, left("a", generation, 1, "interrupted", "no interface has the address"))
        group, [join] = step(group, left("b", generation, 1, "interrupted"))
        assert isinstance(join, e.Join)
        assert len(join.view.members) == 2
    assert group.cause == "no interface has the address"


@pytest.mark.parametrize("killed", [False, True])
def test_what_interrupted_a_member_first_is_the_cause_unless_a_worker_was_lost(killed: bool) -> None:
    group = group_in(T)
    group, _ = step(group, left("a", 0, 1, "interrupted", "cannot start the all-reduce"))
    assert group.cause == "cannot start the all-reduce"
    group, _ = step(group, e.Lost("b", "killed") if killed else left("b", 0, 1, "interrupted", "connection closed"))
    assert group.cause == ("killed" if killed else "cannot start the all-reduce")


def test_a_loss_remains_the_cause_of_what_interrupts_others() -> None:
    group, _ = step(group_in(T), e.Lost("b", "killed"))
    group, _ = step(group, left("a", 0, 1, "interrupted", "connection closed"))
    assert group.cause == "killed"


def test_a_run_that_is_to_stop_does_not_fail_by_its_limits() -> None:
    group = replace(group_in(P), limits=replace(LIMITS, max_failures=0), stopping=True)
    group, _ = step(group, e.Late(0))
    group, _ = step(group, left("a", 0, 1, "interrupted"))
    group, commands = step(group, left("b", 0, 1, "interrupted"))
    assert (group.failure, commands) == ("", [e.HandOver((("a", WHOLE),), 1)])


def test_workers_lost_while_others_trained_do_not_count_when_too_few_are_left() -> None:
    group = replace(group_in(T), limits=replace(LIMITS, sizes=SizeTable(2, 2, 2)), stillborn=10)
    group, _ = step(group, e.Lost("a"))
    group, _ = step(group, left("b", 0, 1, "interrupted"))
    assert (group.phase, group.stillborn) == (G, 0)


def test_workers_that_wait_for_one_another_twice_at_one_step_end_the_run() -> None:
    group = group_in(T)
    for generation in (0, 1):
        group, _ = step(group, e.Stuck(generation))
        group, _ = step(group, left("a", generation, 1, "interrupted"))
        group, commands = step(group, left("b", generation, 1, "interrupted"))
        if generation == 0:
            assert [type(command) for command in commands] == [e.Join]
            for name in ("a", "b"):
                group, _ = step(group, e.Joined(name, 1))
    assert commands == [e.HandOver((("a", WHOLE),), 1)]
    assert group.failure == "all workers waited for one another in step 2, twice: the collective makes no progress"


def test_a_loss_after_the_last_step_does_not_undo_it() -> None:
    group = group_in(T)
    group, _ = step(group, e.Committed(0, 3))
    group, _ = step(group, e.Lost("a"))
    group, [join] = step(group, left("b", 0, 3, "interrupted"))
    # All steps are made; the evaluation after the last one is not.
    assert isinstance(join, e.Join)
    assert join.first_step == LIMITS.steps
    group, _ = step(group, e.Joined("b", 1))
    group, commands = step(group, left("b", 1, 3, "finished"))
    assert commands == [e.HandOver((("b", WHOLE),), 3)]


def test_a_stopped_run_ends_as_stopped_even_if_nothing_can_be_saved() -> None:
    group, _ = step(group_in(T), e.Stop())
    group, _ = step(group, e.Lost("a"))
    group, commands = step(group, e.Lost("b"))
    assert commands == [e.End("stopped", "every worker that held the state after step 1 was lost")]


def drained(minimum: int) -> Group:
    """Two workers that train, after step 1; `a` is to leave."""
    group = replace(group_in(T), limits=replace(LIMITS, sizes=SizeTable(minimum, 2, 2)))
    group, commands = step(group, e.Notice("a"))
    assert (group.phase, [type(command).__name__ for command in commands]) == (T, ["Start"])
    return group


def paused(group: Group) -> tuple[Group, list[e.Command]]:
    """The group after everybody came to the boundary after step 3."""
    group, _ = step(group, e.Committed(group.generation, 3))
    for name in ("a", "b"):
        group, commands = step(group, left(name, group.generation, 3, "paused"))
    return group, commands


def test_too_few_remaining_workers_train_until_a_node_goes_soon_and_then_wait() -> None:
    group = drained(minimum=2)
    group, commands = step(group, e.Late(group.generation))
    assert (group.phase, commands) == (P, [e.Pause(0)])
    group, commands = paused(group)
    # A worker that stays holds the state.
    assert (group.phase, commands) == (G, [e.Wait(1, 2)])
    group, commands = step(group, e.Lost("a"))
    assert (group.phase, group.committed) == (G, 3)


def test_the_state_is_saved_before_all_of_its_holders_leave() -> None:
    group = drained(minimum=2)
    group, _ = step(group, e.Notice("b"))
    group, _ = step(group, e.Late(group.generation))
    group, commands = paused(group)
    assert (group.phase, commands) == (G, [e.Keep(3), e.Wait(0, 2)])
    group, _ = step(group, e.Saved(3))
    group, _ = step(group, e.Lost("a"))
    group, commands = step(group, e.Lost("b"))
    assert (group.committed, group.durable) == (3, 3)
    group, commands = step(group, e.Ready("worker-2", -1))
    assert commands == [e.Restore("worker-2", 3, WHOLE), e.Wait(0, 2)]


def test_a_group_that_went_back_goes_on_from_a_newer_checkpoint_that_is_complete_after_that() -> None:
    group = replace(drained(minimum=2), committed=3, durable=1)
    group, _ = step(group, e.Lost("a"))
    group, _ = step(group, e.Lost("b"))
    group, commands = step(group, e.Ready("worker-2", -1))
    assert commands == [e.Restore("worker-2", 1, WHOLE), e.Wait(0, 2)]
    group, commands = step(group, e.Saved(3))
    assert (group.committed, group.durable) == (3, 3)
    group, commands = step(group, e.Ready("worker-2", 1, WHOLE))
    assert commands == [e.Restore("worker-2", 3, WHOLE), e.Wait(0, 2)]


def test_late_training_continues_if_no_member_leaves() -> None:
    group = group_in(T)
    assert step(group, e.Late(0)) == (group, [])


SCOPES: dict[str, tuple[tuple[int, int, int], dict[str, int]]] = {
    "two deaths": ((1, 0, 2), {"capacity": 2, "deaths": 2}),
    "a death and a join": ((1, 0, 2), {"capacity": 1, "deaths": 1, "arrivals": 1}),
    "a drain and a death": ((1, 0, 2), {"capacity": 2, "drains": 1, "deaths": 1}),
    "a drain and a join": ((2, 0, 2), {"capacity": 2, "drains": 1, "arrivals": 1}),
    "all drained": ((1, 0, 2), {"capacity": 2, "drains": 2, "lates": 1}),
    "a spare": ((1, 1, 2), {"capacity": 3}),
    "a spare, held back": ((1, 1, 2), {"capacity": 2, "deaths": 1}),
    "a fault": ((1, 0, 2), {"capacity": 2, "faults": 1}),
    "limits and a death": ((1, 0, 2), {"capacity": 2, "lates": 1, "deaths": 1}),
    "a stop and a death": ((1, 0, 2), {"capacity": 2, "stops": 1, "deaths": 1}),
    "a stop and two deaths": ((1, 0, 2), {"capacity": 2, "stops": 1, "deaths": 2}),
    "doubled and lost messages": ((1, 0, 2), {"capacity": 2, "doubles": 1, "losses": 1}),
    "a checkpoint and two deaths": ((1, 0, 2), {"capacity": 2, "saves": 1, "deaths": 2}),
    "fewer are requested, and a death": ((1, 0, 2), {"capacity": 2, "wishes": ((1, 1, 0),), "deaths": 1}),
    "fewer are requested, then as many": ((1, 0, 2), {"capacity": 2, "wishes": ((1, 1, 0), (2, 2, 0))}),
    "one of two too many goes": ((2, 0, 2), {"capacity": 2, "wishes": ((1, 1, 0),), "drains": 1}),
    "more are requested": ((1, 0, 1), {"capacity": 2, "wishes": ((2, 2, 0),), "deaths": 1}),
    "fewer are requested, then more": ((1, 1, 2), {"capacity": 3, "wishes": ((1, 1, 0), (1, 2, 0))}),
    "on from a checkpoint": ((2, 0, 2), {"capacity": 2, "durable": 0, "deaths": 1}),
    "on from a damaged checkpoint": ((1, 0, 2), {"capacity": 2, "durable": 0, "damages": 1, "deaths": 1}),
}
"""(minimum, spares, expected) and what may happen."""


def scope(minimum: int, spares: int, expected: int, happening: dict[str, Any], maximum: int = 3) -> Any:
    limits = Limits(
        sizes=SizeTable(minimum, maximum, 3),
        spares=spares,
        steps=2,
        max_failures=None,
        expected=expected,
    )
    return first_world(limits, **happening)


LONG = {"a stop and two deaths", "a checkpoint and two deaths", "limits and a death", "more are requested"}
"""These take long, and each thing that happens in them also happens in shorter ones."""


def but_the_long_ones(scopes: Iterable[str], long: set[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in long else ()) for name in scopes]


@pytest.mark.parametrize("name", but_the_long_ones(SCOPES, LONG))
def test_every_order_of_events_in_a_small_world(name: str) -> None:
    sizes, happening = SCOPES[name]
    taken = explore(scope(*sizes, happening, maximum=2))
    happened = {"deaths": "death", "arrivals": "arrival", "drains": "drain", "faults": "fault", "lates": "late"}
    happened |= {
        "wishes": "rescale",
        "saves": "saved",
        "damages": "damaged",
        "stops": "stop",
        "doubles": "doubled",
        "losses": "lost",
    }
    assert all(taken[word] for key, word in happened.items() if happening.get(key))


STAGED: dict[str, tuple[int, int, tuple[int, ...], dict[str, int]]] = {
    "one replica, a death": (2, 2, (2,), {"capacity": 2, "deaths": 1, "arrivals": 1}),
    "one replica, a death, a checkpoint": (2, 2, (2,), {"capacity": 2, "deaths": 1, "arrivals": 1, "saves": 1}),
    "one replica, on from a checkpoint": (2, 2, (2,), {"capacity": 2, "durable": 0, "deaths": 1, "arrivals": 1}),
    "one replica, on from a damaged checkpoint": (2, 2, (2,), {"capacity": 2, "durable": 0, "damages": 1, "deaths": 1}),
    "one replica, a stop that takes too long": (2, 2, (2,), {"capacity": 2, "stops": 1, "lates": 1}),
    "repartition": (1, 2, (2, 1), {"capacity": 2, "drains": 1}),
    "repartition on request, and back": (1, 2, (2, 1), {"capacity": 2, "wishes": ((1, 1, 0), (1, 2, 0)), "deaths": 1}),
    "repartition, and back": (1, 2, (2, 1), {"capacity": 1, "arrivals": 1}),
    "repartition for one that dies": (1, 2, (2, 1), {"capacity": 1, "arrivals": 1, "deaths": 1}),
    "repartition from a checkpoint": (1, 2, (2, 1), {"capacity": 2, "deaths": 1, "saves": 1}),
    "no repartition if one stage is too large": (1, 2, (2, 1), {"capacity": 2, "misfits": 1, "deaths": 1}),
    "repartition of three stages into two": (2, 3, (3, 2), {"capacity": 3, "drains": 1, "deaths": 1}),
    "repartition of three stages, and back": (
        2,
        3,
        (3, 2),
        {"capacity": 3, "wishes": ((2, 2, 0), (2, 3, 0)), "deaths": 1, "saves": 1},
    ),
}
"""(minimum, maximum, numbers of stages) and what may happen."""
STAGED_AND_LONG = {
    "repartition on request, and back",
    "repartition of three stages into two",
    "repartition of three stages, and back",
}


def staged(
    minimum: int,
    maximum: int,
    counts: tuple[int, ...],
    happening: dict[str, Any],
    steps: int = 2,
    spares: int = 0,
    slices: int = 1,
) -> Any:
    limits = Limits(
        sizes=SizeTable(minimum, maximum, 2, counts, slices),
        spares=spares,
        steps=steps,
        max_failures=None,
        expected=happening["capacity"],
    )
    return first_world(limits, **happening)


@pytest.mark.parametrize("name", but_the_long_ones(STAGED, STAGED_AND_LONG))
def test_every_order_of_events_among_stages(name: str) -> None:
    taken = explore(staged(*STAGED[name]))
    assert taken["summed"]
    assert taken["applied"]


SLICED: dict[str, tuple[int, int, tuple[int, ...], dict[str, Any], int]] = {
    "one replica, a death": (2, 2, (1,), {"capacity": 2, "deaths": 1, "arrivals": 1}, 2),
    "slices on fewer workers, and back": (1, 2, (1,), {"capacity": 1, "arrivals": 1, "deaths": 1}, 2),
    "slices of one that dies": (1, 2, (1,), {"capacity": 2, "deaths": 1, "saves": 1}, 2),
    "slices on fewer workers, on request": (1, 2, (1,), {"capacity": 2, "wishes": ((1, 1, 0), (1, 2, 0))}, 2),
    "stages of two workers, then of one": (2, 4, (2,), {"capacity": 4, "drains": 1}, 2),
    "four slices on two workers": (1, 4, (1,), {"capacity": 3, "drains": 1, "arrivals": 1}, 4),
}
"""(minimum, maximum, numbers of stages), what may happen, and the number of tensor slices."""
SLICED_AND_LONG = {"stages of two workers, then of one", "four slices on two workers"}


@pytest.mark.parametrize("name", but_the_long_ones(SLICED, SLICED_AND_LONG))
def test_every_order_of_events_among_slices(name: str) -> None:
    *how, slices = SLICED[name]
    taken = explore(staged(*how, slices=slices))
    assert taken["summed"]
    assert taken["applied"]


COPIED: dict[str, tuple[int, int, tuple[int, ...], dict[str, int], int]] = {
    "one replica, a death": (2, 2, (2,), {"capacity": 2, "deaths": 1, "arrivals": 1}, 0),
    "one replica, a death, a checkpoint": (2, 2, (2,), {"capacity": 2, "deaths": 1, "arrivals": 1, "saves": 1}, 0),
    "one replica, a fault": (2, 2, (2,), {"capacity": 2, "faults": 1}, 0),
    "one replica, a death, a stop": (2, 2, (2,), {"capacity": 2, "deaths": 1, "stops": 1}, 0),
    "repartition for one that dies": (1, 2, (2, 1), {"capacity": 2, "deaths": 1}, 0),
    "one replica, a fault, a stop": (2, 2, (2,), {"capacity": 2, "faults": 1, "stops": 1}, 0),
    "one worker and a spare": (1, 1, (1,), {"capacity": 2, "deaths": 1}, 1),
}
"""(minimum, maximum, numbers of stages), what may happen, and spares; each state has one copy."""
COPIED_AND_SHORT = {"one replica, a death", "one worker and a spare"}


def copied(name: str) -> Any:
    minimum, maximum, counts, happening, spares = COPIED[name]
    return staged(minimum, maximum, counts, {**happening, "copies": 1}, steps=3, spares=spares)


@pytest.mark.parametrize("name", but_the_long_ones(COPIED, set(COPIED) - COPIED_AND_SHORT))
def test_every_order_of_events_with_copies_in_memory(name: str) -> None:
    again = []

    def look(world: Any) -> None:
        again.append(world.group.again >= 0)

    taken = explore(copied(name), look=look)
    assert taken["kept"]
    assert any(again)


def controlled() -> dict[str, Callable[[], Any]]:
    """Return the small worlds, in each of which the controller also dies once."""
    once = {"controllers": 1}
    found: dict[str, Callable[[], Any]] = {}
    for name, (sizes, happening) in SCOPES.items():
        found[name] = partial(scope, *sizes, {**happening, **once}, maximum=2)
    for name, (*how, happening) in STAGED.items():
        found[f"stages: {name}"] = partial(staged, *how, {**happening, **once})
    for name, (*how, happening, slices) in SLICED.items():
        found[f"slices: {name}"] = partial(staged, *how, {**happening, **once}, slices=slices)
    for name, (*how, happening, spares) in COPIED.items():
        more = {**happening, **once, "copies": 1}
        found[f"copies: {name}"] = partial(staged, *how, more, steps=3, spares=spares)
    return found


CONTROLLED = controlled()
CONTROLLED_AND_SHORT = {
    "a death and a join",
    "a drain and a join",
    "a spare",
    "a spare, held back",
    "a fault",
    "a stop and a death",
    "doubled and lost messages",
    "fewer are requested, and a death",
    "one of two too many goes",
    "stages: one replica, a death, a checkpoint",
    "stages: one replica, a stop that takes too long",
    "stages: repartition",
    "stages: repartition, and back",
    "copies: one worker and a spare",
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", but_the_long_ones(CONTROLLED, CONTROLLED.keys() - CONTROLLED_AND_SHORT))
def test_every_order_of_events_if_the_controller_dies(name: str) -> None:
    assert explore(CONTROLLED[name]())["controller"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_order_of_two_deaths_with_copies_in_memory() -> None:
    happening = {"capacity": 2, "deaths": 2, "arrivals": 2, "copies": 2}
    assert explore(staged(2, 2, (2,), happening, steps=3))["worlds"] > 40_000


@pytest.mark.parametrize(
    "happening", [{"capacity": 1, "arrivals": 1, "lates": 2}, {"capacity": 2, "drains": 1, "lates": 1}]
)
def test_no_step_is_recomputed_without_a_death_however_often_a_repartition_fails(
    happening: dict[str, int],
) -> None:
    def look(world: Any) -> None:
        assert world.line == 0, world

    # A worker that is dismissed because it does not leave in time counts as dead.
    with broken(**rules(LEAVE_Late=Rule(stay, (L,)))):
        taken = explore(staged(1, 2, (2, 1), happening), look=look)
    assert taken["late"]
    assert taken["copied"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_order_of_events_in_two_replicas_of_two_stages() -> None:
    assert explore(staged(2, 4, (2,), {"capacity": 4, "deaths": 1}))["worlds"] > 100_000


def test_pieces_of_two_partitions_make_up_a_state() -> None:
    """A repartition of three stages into two was cut short after one member had its new stage."""
    limits = Limits(sizes=SizeTable(2, 3, 1, (3, 2)), spares=0, steps=9, max_failures=None, expected=3)
    layers = {1: ["abcd"], 2: ["abc", "d"], 3: ["a", "bc", "d"]}
    parts = {
        Stage(number, of): Pieces.of(map(Piece, names))
        for of, stages in layers.items()
        for number, names in enumerate(stages)
    }
    held = {"x": Stage(0, 2), "y": Stage(2, 3)}
    workers = {name: WorkerStatus("idle", holds=4, stage=stage) for name, stage in held.items()}
    group = Group(limits=replace(limits, parts=parts), phase=L, generation=1, workers=workers, committed=4)
    assert newest_state(group) == NewestState(4, (("x", Stage(0, 2)), ("y", Stage(2, 3))))
    # If both partitions are complete, that of the group counts.
    both = {
        "w": WorkerStatus("idle", holds=4, stage=WHOLE),
        **workers,
        "z": WorkerStatus("idle", holds=4, stage=Stage(1, 2)),
    }
    for shape, donors in ((Shape(1), (("w", WHOLE),)), (Shape(1, 2), halves("x", "z"))):
        assert newest_state(replace(group, shape=shape, workers=both)) == NewestState(4, donors)
    # If layers are not measured, stages are equal parts.
    assert newest_state(replace(group, limits=limits)) == NewestState(-1, ())
    _, [join] = step(replace(group, workers={**workers, "z": WorkerStatus("in")}), e.Lost("z"))
    assert isinstance(join, e.Join)
    assert (join.first_step, join.view.shape, join.lacks) == (5, Shape(1, 2), {"y": "stage"})


def test_parts_of_another_partition_keep_no_worker_from_reading_a_checkpoint() -> None:
    limits = Limits(sizes=SizeTable(2, 3, 1, (3, 2)), spares=0, steps=9, max_failures=None, expected=3)
    workers = {name: WorkerStatus("idle", holds=4, stage=Stage(number, 3)) for number, name in enumerate("ab")}
    workers["c"] = WorkerStatus("restoring", stage=Stage(2, 3))
    group = Group(limits=limits, workers=workers, committed=4, durable=4)
    group, commands = step(group, e.Lost("c"))
    assert [command for command in commands if isinstance(command, e.Restore)] == [
        e.Restore("a", 4, Stage(0, 2)),
        e.Restore("b", 4, Stage(1, 2)),
    ]


def test_held_states_of_recomputed_steps_no_longer_count() -> None:
    limits = Limits(sizes=SizeTable(2, 6, 6, (2,)), spares=0, steps=9, max_failures=None, expected=2)
    front = WorkerStatus("idle", holds=3, stage=Stage(0, 2))
    group = Group(
        limits=limits,
        phase=L,
        generation=0,
        shape=Shape(3, 2),
        seats=("a", "x", "b", "y", "c", "z"),
        workers={"a": front, "b": front, "c": front, "z": WorkerStatus("in", holds=1, stage=Stage(1, 2))},
        committed=3,
        durable=1,
    )
    group, commands = step(group, e.Lost("z"))
    assert [command for command in commands if isinstance(command, e.Restore)] == [
        e.Restore("a", 1, Stage(0, 2)),
        e.Restore("b", 1, Stage(1, 2)),
    ]
    assert (group.committed, group.workers["c"].holds) == (1, None)
    # What it holds of step 3 must not be mixed with what others will make of that step.
    group, _ = step(group, e.Ready("a", 1, Stage(0, 2)))
    group, [join] = step(group, e.Ready("b", 1, Stage(1, 2)))
    assert isinstance(join, e.Join)
    assert (join.donors, join.view.shape, join.lacks) == (halves("a", "b"), Shape(1, 2), {})


def test_a_copy_of_an_undone_step_no_longer_counts() -> None:
    limits = Limits(sizes=SizeTable(3, 3, 3, (3,)), spares=0, steps=9, max_failures=None, expected=3)
    old = frozenset({(5, Stage(0, 3)), (5, Stage(1, 3)), (2, Stage(0, 3))})
    workers = {"a": WorkerStatus("idle", holds=5, stage=Stage(0, 3), copies=old), "b": WorkerStatus("in", holds=5)}
    group = Group(limits=limits, phase=L, generation=1, seats=("a", "b", "c"), workers=workers, committed=5, durable=3)
    group, _ = step(group, e.Lost("b"))
    assert group.phase is G
    assert group.committed == 3
    assert group.workers["a"].copies == {(2, Stage(0, 3))}


def test_copies_older_than_a_checkpoint_are_not_used() -> None:
    limits = Limits(sizes=SizeTable(1, 1, 1), spares=1, steps=99, max_failures=None, expected=1)
    spare = WorkerStatus("idle", copies=frozenset({(7, WHOLE)}))
    group = Group(limits=limits, phase=T, generation=1, seats=("a",), workers={"a": WorkerStatus("in"), "s": spare})
    after, commands = step(replace(group, committed=9, durable=5), e.Lost("a"))
    [join] = [command for command in commands if isinstance(command, e.Join)]
    assert (join.first_step, join.donors, join.lacks, join.again) == (8, (("s", WHOLE),), {"s": "newer"}, True)
    assert (after.committed, after.again) == (7, 9)
    after, commands = step(replace(group, committed=9, durable=8), e.Lost("a"))
    assert after.phase is G
    assert e.Restore("s", 8, WHOLE) in commands


def test_a_run_that_stops_within_overlapping_steps_loads_its_copies_to_save_them() -> None:
    limits = Limits(sizes=SizeTable(2, 2, 1, (2,)), spares=0, steps=99, max_failures=None, expected=2)
    stages = {"a": Stage(0, 2), "b": Stage(1, 2)}
    workers = {
        name: WorkerStatus("in", holds=7, stage=stage, copies=frozenset({(7, stage)})) for name, stage in stages.items()
    }
    group = Group(limits=limits, phase=L, generation=1, shape=Shape(1, 2), seats=("a", "b"), workers=workers)
    group = replace(group, committed=7, durable=3, stopping=True)
    group, _ = step(group, e.Left("a", 1, None, "interrupted", stage=stages["a"]))
    group, commands = step(group, e.Left("b", 1, None, "interrupted", stage=stages["b"]))
    assert (group.phase, commands) == (L, [e.Recall(("a", "b"), 7, 1)])
    taken = group
    for name, stage in stages.items():
        taken, commands = step(taken, e.Left(name, 1, 7, "interrupted", stage=stage))
    assert (taken.phase, commands) == (C, [e.HandOver(halves("a", "b"), 7)])
    # If the copies of all do not make up the state, nobody loads one.
    alone = WorkerStatus("in", copies=frozenset((7, stage) for stage in stages.values()))
    _, commands = step(
        replace(group, workers={"a": alone}, recalled=False), e.Left("a", 1, None, "interrupted", stage=stages["a"])
    )
    assert commands == [e.HandOver(halves("a", "a"), 7)]
    # A worker that cannot load its copy provides it instead.
    group, _ = step(group, e.Left("a", 1, 7, "interrupted", stage=stages["a"]))
    group, commands = step(group, e.Left("b", 1, None, "interrupted", stage=stages["b"]))
    assert (group.phase, commands) == (C, [e.HandOver(halves("a", "b"), 7)])


@pytest.mark.parametrize("event", [e.Late(1), e.Stop(), e.Lost("c")])
def test_a_run_that_ends_while_it_waits_for_workers_loads_its_copies_too(event: e.Event) -> None:
    limits = Limits(sizes=SizeTable(2, 2, 1, (2,)), spares=0, steps=99, max_failures=None, expected=2)
    workers = {
        name: WorkerStatus("idle", stage=stage, copies=frozenset({(7, stage)}), leaving=name == "b")
        for name, stage in halves("a", "b")
    }
    workers["c"] = WorkerStatus("coming")
    group = Group(limits=limits, phase=G, generation=1, shape=Shape(1, 2), seats=("a", "b"), workers=workers)
    # The next loss of a worker that starts ends the run.
    group, commands = step(replace(group, committed=7, durable=3, stillborn=10), event)
    assert (group.phase, commands) == (L, [e.Recall(("a", "b"), 7, 1)])
    assert L in TABLE[G, type(event)].leads


def test_a_members_own_copy_counts_though_no_buddy_has_it_yet() -> None:
    limits = Limits(sizes=SizeTable(2, 2, 1, (2,)), spares=0, steps=99, max_failures=None, expected=2)
    stages = {"a": Stage(0, 2), "b": Stage(1, 2)}
    workers = {name: WorkerStatus("in", holds=7, stage=stage) for name, stage in stages.items()}
    group = Group(limits=limits, phase=L, generation=1, shape=Shape(1, 2), seats=("a", "b"), workers=workers)
    group = replace(group, committed=15, durable=3)
    group, _ = step(group, e.Left("a", 1, None, "failed", "oops", stage=stages["a"], copy=15))
    group, [join] = step(group, e.Left("b", 1, None, "interrupted", stage=stages["b"], copy=15))
    assert isinstance(join, e.Join)
    assert (join.first_step, join.donors, join.again) == (16, halves("a", "b"), False)


def test_a_worker_that_has_lost_a_copy_is_not_asked_for_it_twice() -> None:
    limits = Limits(sizes=SizeTable(1, 1, 1), spares=1, steps=99, max_failures=None, expected=1)
    spare = WorkerStatus("idle", copies=frozenset({(7, WHOLE)}))
    group = Group(limits=limits, phase=T, generation=1, seats=("a",), workers={"a": WorkerStatus("in"), "s": spare})
    group, _ = step(replace(group, committed=9, durable=5), e.Lost("a"))
    assert group.phase is J
    group, _ = step(group, e.CopyMissing("s"))
    group, commands = step(group, left("s", group.generation, None, "interrupted"))
    assert e.Restore("s", 5, WHOLE) in commands
    waiting = replace(group, phase=G, workers={"s": spare})
    assert not step(waiting, e.CopyMissing("s"))[0].workers["s"].copies


def test_a_worker_that_takes_another_stage_keeps_its_state_only_if_it_counts() -> None:
    limits = Limits(sizes=SizeTable(2, 2, 2, (2, 1)), spares=0, steps=9, max_failures=None, expected=2)
    whole = WorkerStatus("idle", holds=3, stage=Stage(0, 1))
    group = Group(limits=limits, phase=G, generation=1, seats=("a",), workers={"a": whole}, committed=3)
    new = {**group.workers, "b": WorkerStatus("up")}
    _, [join] = step(replace(group, workers=new), e.Ready("b", -1))
    assert isinstance(join, e.Join)
    assert join.lacks == {"a": "stage", "b": "newer"}
    # What it has read of a damaged checkpoint.
    void = {**group.workers, "b": WorkerStatus("restoring")}
    _, [join] = step(replace(group, workers=void), e.Ready("b", 3, Stage(1, 2)))
    assert isinstance(join, e.Join)
    assert join.lacks == {"a": "stage", "b": "newer"}


def test_an_old_ready_report_does_not_end_the_reading_of_a_checkpoint() -> None:
    limits = Limits(sizes=SizeTable(1, 1, 2), spares=0, steps=9, max_failures=None, expected=1)
    reader = WorkerStatus("restoring", stage=Stage(0, 1))
    group = Group(limits=limits, phase=G, generation=1, workers={"a": reader}, committed=3, durable=3)
    assert step(group, e.Ready("a", -1))[0] == group
    assert step(group, e.Ready("a", 3, Stage(0, 1)))[0].phase is J


ALL: dict[str, Any] = {
    "capacity": 3,
    "deaths": 3,
    "arrivals": 2,
    "drains": 1,
    "doubles": 2,
    "losses": 2,
    "faults": 1,
    "lates": 1,
    "saves": 2,
    "damages": 1,
    "copies": 3,
    "wishes": ((1, 2, 0), (2, 3, 1)),
}
"""Everything that can happen, and how often."""

STAGES_AND_ALL = staged(
    1,
    4,
    (2, 1),
    ALL,
)
"""All that can happen to one or two replicas of two stages that may be repartitioned into one."""


def test_random_paths_through_everything_that_can_happen_to_stages() -> None:
    lengths = [wander(STAGES_AND_ALL, Random(number)) for number in range(60)]
    assert max(lengths) > 50


@pytest.mark.parametrize("count", [40, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("stages", [False, True])
def test_random_paths_on_which_controllers_die(stages: bool, count: int) -> None:
    world = STAGES_AND_ALL if stages else EVERYTHING
    for number in range(count):
        wander(world._replace(controllers=2), Random(number))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_very_many_random_paths_through_everything_that_can_happen_to_stages() -> None:
    for number in range(20_000):
        wander(STAGES_AND_ALL, Random(number))


LARGE = {
    "three workers, two deaths": ((1, 0, 3), {"capacity": 3, "deaths": 2}),
    "a death, two joins": ((2, 0, 2), {"capacity": 2, "arrivals": 2, "deaths": 1}),
    "a death, a drain": ((2, 0, 2), {"capacity": 3, "drains": 1, "deaths": 1}),
    "a death, doubled and lost messages": ((1, 0, 2), {"capacity": 2, "deaths": 1, "doubles": 1, "losses": 1}),
    "a spare and a death": ((1, 1, 2), {"capacity": 3, "deaths": 1}),
    "a stop, a death, a join": ((2, 0, 2), {"capacity": 2, "stops": 1, "deaths": 1, "arrivals": 1}),
    "all drained": ((1, 0, 3), {"capacity": 3, "drains": 3, "lates": 1}),
    "two faults": ((1, 0, 2), {"capacity": 2, "faults": 2}),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LARGE)
def test_every_order_of_events_among_three_workers(name: str) -> None:
    sizes, happening = LARGE[name]
    assert explore(scope(*sizes, happening))["worlds"] > 10_000


ALL_AT_ONCE = {
    "three workers": ((1, 0, 3), {"capacity": 3, "deaths": 2, "drains": 1, "losses": 1, "doubles": 1}),
    "one worker that two join": ((1, 0, 1), {"capacity": 1, "arrivals": 2, "deaths": 1, "drains": 1}),
}
"""As in `SCOPES`. Two workers join the three, for the two that die; two more joining before any death would be too
large."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ALL_AT_ONCE)
def test_every_order_of_deaths_joins_and_a_drain(name: str) -> None:
    sizes, happening = ALL_AT_ONCE[name]
    started = time.process_time()
    taken = explore(scope(*sizes, {**happening, "alike": True}), most=10_000_000)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(f"{taken['worlds']} worlds, {time.process_time() - started:.0f} s of CPU, {memory:.2f} GiB at most; {taken}")
    assert taken["worlds"] > 100_000


@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_treating_workers_as_alike_leaves_no_world_out(deaths: int) -> None:
    def visited(alike: bool) -> set[bytes]:
        world = scope(1, 0, 2, {"capacity": 2, "deaths": deaths, "alike": alike}, maximum=2)
        found: set[bytes] = set()
        explore(world, look=lambda world: found.add(mark(world._replace(alike=True))))
        return found

    apart, alike = visited(False), visited(True)
    assert apart <= alike
    assert len(alike) < 1.1 * len(apart)


EVERYTHING = scope(
    1,
    1,
    3,
    ALL,
)
"""All that can happen, in one world of three workers and a spare: too large to be visited whole."""


def test_random_paths_through_everything_that_can_happen() -> None:
    lengths = [wander(EVERYTHING, Random(number)) for number in range(60)]
    assert max(lengths) > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_very_many_random_paths_through_everything_that_can_happen() -> None:
    for number in range(20_000):
        wander(EVERYTHING, Random(number))


@contextmanager
def broken(**changes: Any) -> Iterator[None]:
    """The machine with some of its functions replaced."""
    before = {name: getattr(state_machine, name) for name in changes}
    for name, function in changes.items():
        setattr(state_machine, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(state_machine, name, function)


def caught(worlds: Iterable[World], changes: dict[str, Any]) -> str:
    """Return what is found in one of these worlds when the machine is changed so; empty if nothing."""
    for world in worlds:
        with broken(**changes):
            try:
                explore(world)
            except (Violation, KeyError, ValueError, IndexError) as error:
                return f"{type(error).__name__}: {error}"
    return ""


def rules(**changes: Rule) -> dict[str, Any]:
    """Return the table with other rules for `PHASE_Event`."""
    table = dict(TABLE)
    for key, rule in changes.items():
        phase, kind = key.split("_")
        table[Phase[phase], getattr(e, kind)] = rule
    return {"TABLE": table}


def any_holder(group: Group) -> NewestState | None:
    names = [name for name, worker in group.workers.items() if worker.state == "idle"]
    return NewestState(group.workers[names[0]].holds or 0, ((names[0], WHOLE),)) if names else None


def least_advanced(group: Group) -> NewestState | None:
    holders = [name for name, worker in group.workers.items() if worker.state == "idle" and worker.holds is not None]
    found = min(holders, key=lambda name: group.workers[name].holds or 0, default=None)
    return None if found is None else NewestState(group.workers[found].holds or 0, ((found, WHOLE),))


def join_without_copies(group: Group, best: NewestState) -> Any:
    after, [join] = _join(group, best)
    assert isinstance(join, e.Join)
    return after, [replace(join, lacks={})]


def join_in_the_same_generation(group: Group, best: NewestState) -> Any:
    after, [join] = _join(group, best)
    assert isinstance(join, e.Join)
    return replace(after, generation=group.generation), [join]


def settle_while_some_are_inside(group: Group) -> Any:
    with broken(members_in=lambda _: ()):
        return _settle(group)


def stay(group: Group, event: Any) -> Any:
    return group, []


def forget(group: Group, event: e.Lost) -> Any:
    return state_machine.without(group, event.worker), []


def nobody_later(group: Group) -> NewestState | None:
    return newest_state(group) if group.generation < 0 or group.phase is C else None


def go_back_to_nothing(group: Group) -> Any:
    return state_machine._gather(replace(group, committed=group.durable))


def read_all_the_same(group: Group, event: e.Unreadable) -> Any:
    return state_machine._ready_gather(group, e.Ready(event.worker, group.durable, WHOLE))


def clean_always(group: Group, event: e.Left) -> Any:
    return _left_leave(group, replace(event, holds=group.committed + 1))


def obey_all(group: Group, event: Any) -> Any:
    return TABLE[group.phase, type(event)].act(group, event)


def obey_the_known(group: Group, event: Any) -> Any:
    known = getattr(event, "worker", None) in (None, *group.workers)
    return obey_all(group, event) if known else (group, [])


def hear_again(group: Group, event: e.Left) -> Any:
    return state_machine._settle(state_machine._out(group, event))


def deaf(kind: type[Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """For each phase in which an event of this kind is handled: the table that then does nothing."""

    def without(phase: Phase) -> dict[str, Any]:
        return {"TABLE": {**TABLE, (phase, kind): Rule(state_machine._nothing, (phase,))}}

    acting = [phase for phase in Phase if TABLE[phase, kind].act is not state_machine._nothing]
    return {f"a {kind.__name__} is not heard: {phase.name}": partial(without, phase) for phase in acting}


_join, _settle, _left_leave = state_machine._join, state_machine._settle, state_machine._left_leave

MUTANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "a partially applied worker is a donor": lambda: {"newest_state": any_holder},
    "the least advanced is the donor": lambda: {"newest_state": least_advanced},
    "nobody copies": lambda: {"_join": join_without_copies},
    "the generation does not rise": lambda: {"_join": join_in_the_same_generation},
    "the next view forms while some are inside": lambda: {"_settle": settle_while_some_are_inside},
    "a loss in training is not acted on": lambda: rules(TRAIN_Lost=Rule(forget, (T,))),
    "a loss while leaving is not acted on": lambda: rules(LEAVE_Lost=Rule(forget, (L,))),
    "a worker that has left is taken for clean": lambda: rules(LEAVE_Left=Rule(clean_always, (L, J, G, C, E))),
    "a worker that has paused is not noted": lambda: rules(PAUSE_Left=Rule(stay, (P,)), PAUSE_Late=Rule(stay, (P,))),
    "an unknown worker's message counts": lambda: {"step": obey_all},
    "a message of an earlier generation counts": lambda: {"step": obey_the_known},
    "a worker that has left is heard again": lambda: rules(LEAVE_Left=Rule(hear_again, (L, J, G, C, E))),
    **deaf(e.Notice),
    **deaf(e.Stop),
    "a lost lead is not replaced": lambda: rules(CLOSE_Lost=Rule(stay, (C,)), CLOSE_Late=Rule(stay, (C,))),
    "steps are given up though somebody holds them": lambda: {"newest_state": nobody_later},
    "the checkpoint is not read": lambda: {"_go_back": go_back_to_nothing},
    "a damaged checkpoint is taken for read": lambda: rules(GATHER_Unreadable=Rule(read_all_the_same, (G, J))),
    "an interrupted formation is waited for": lambda: rules(JOIN_Lost=Rule(forget, (J,)), JOIN_Left=Rule(stay, (J,))),
}


def any_stage_will_do(group: Group, best: NewestState) -> Any:
    """Members keep a state of that step, whichever stage it is of."""
    after, [join] = _join(group, best)
    assert isinstance(join, e.Join)
    lacks = {name: what for name, what in join.lacks.items() if group.workers[name].holds != best.step}
    return after, [replace(join, lacks=lacks)]


def one_stage_is_enough(group: Group) -> NewestState | None:
    """A state counts if a single stage of it is held."""
    best = newest_state(group)
    newest = max((worker.holds for worker in group.workers.values() if worker.holds is not None), default=-1)
    donors = tuple(
        (name, worker.stage)
        for name, worker in group.workers.items()
        if worker.state == "idle" and worker.holds == newest and worker.stage
    )
    return NewestState(newest, donors) if newest > -1 and donors else best


def hand_over_the_first(group: Group) -> Any:
    after, commands = _close(group)
    return after, [
        replace(command, donors=command.donors[:1]) if isinstance(command, e.HandOver) else command
        for command in commands
    ]


_close = state_machine._close

CATCHING = (
    "one replica, a stop that takes too long",
    "one replica, a death, a checkpoint",
    "repartition from a checkpoint",
    "one replica, on from a damaged checkpoint",
)
STAGED_MUTANTS: dict[str, dict[str, Any]] = {
    "a step that others have applied is not finished": {"unfinished": lambda group: ()},
    "a member keeps the state of another stage": {"_join": any_stage_will_do},
    "one stage stands for all": {"newest_state": one_stage_is_enough},
    "one stage alone is handed over": {"_close": hand_over_the_first},
}


@pytest.mark.parametrize("name", STAGED_MUTANTS)
def test_a_table_that_is_broken_for_stages_is_caught(name: str) -> None:
    assert caught([staged(*STAGED[scope]) for scope in CATCHING], STAGED_MUTANTS[name])


def without_copies(group: Group) -> NewestState | None:
    bare = {name: replace(worker, copies=frozenset()) for name, worker in group.workers.items()}
    return newest_state(replace(group, workers=bare))


def told_twice(group: Group, best: NewestState) -> Any:
    after, [join] = _join(group, best)
    assert isinstance(join, e.Join)
    return after, [replace(join, again=False)]


def a_copy_is_held(group: Group) -> NewestState | None:
    best = newest_state(group)
    return None if best is None else replace(best, copied=False)


COPIES_MUTANTS: dict[str, dict[str, Any]] = {
    "copies are not looked for": {"newest_state": without_copies},
    "recomputed steps are announced again": {"_join": told_twice},
    "what has a copy is undone": {"newest_state": a_copy_is_held},
}


@pytest.mark.parametrize("name", COPIES_MUTANTS)
def test_a_table_that_is_broken_for_copies_is_caught(name: str) -> None:
    assert caught([copied(small) for small in COPIED], COPIES_MUTANTS[name])


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_table_is_caught(name: str) -> None:
    # The smaller ones first: most is found there.
    small = (
        "one of two too many goes",
        "a stop and a death",
        "on from a damaged checkpoint",
        "a drain and a death",
        "a fault",
        "a stop and two deaths",
    )
    assert caught([scope(*SCOPES[one][0], SCOPES[one][1], maximum=2) for one in small], MUTANTS[name]())


def test_the_readme_shows_the_table() -> None:
    text = (Path(state_machine.__file__).parents[1] / "README.md").read_text()
    assert diagram() in text
