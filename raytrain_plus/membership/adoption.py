"""Take over a group whose controller has died: from what its members have of it, and what they say of themselves. Pure.

The members train meanwhile. Their charter has the group as it was when their generation was to form; what has happened
since is told to it again, in events: who has joined, who has come out, and who is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Group, WorkerStatus, members_in, rescaled
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.state_machine import Outcome, step


@dataclass(frozen=True, kw_only=True, slots=True)
class Survivor:
    """A living, prepared worker, as it answers a controller that adopts it."""

    node: str
    generation: int
    """The newest generation that it was called into; -1 if it was in none."""
    joined: bool
    """Whether it was in the worlds of that generation, with the state."""
    left: e.Left | None
    """How it came out of that, with what it holds now; None while it is inside.

    It was interrupted if it has read a checkpoint since. If it was in no generation, only what it holds counts: -1 for
    the initial state, which None stands for too, and None after a warm-up step.
    """
    copies: frozenset[tuple[int, Stage, int]] = frozenset()
    """Steps and stages that it keeps copies of, each with the generation in which the copy was made."""


def adopt(
    group: Group,
    survivors: Mapping[str, Survivor],
    *,
    committed: int,
    durable: int,
    named: int,
    void_above: int | None = None,
    requests: Iterable[e.Stop | e.Rescale | e.Notice] = (),
) -> Outcome:
    """Return the group that these workers are now, and the commands to carry out.

    `group`: as it was when the newest generation of any of them was to form. `committed`: the highest step that the
    record has as committed; `durable`: the step of the newest checkpoint. `named`: how many names were given to
    workers. `void_above`: the lowest step to which the run has gone back since, by the record, if it has. `requests`:
    what was requested since, in order; it counts in all that is decided here.

    `Formed` is among the commands if all members have joined, though it may have been carried out before.
    """
    void = void_above is not None
    here = {name: one for name, one in survivors.items() if _belongs(group, name, one, void)}
    formed = _has_formed(group, here, committed)
    # What was being saved may never be complete: it is requested again.
    group = replace(group, named=max(group.named, named), kept=-1)
    last = group.limits.steps if void_above is None else void_above
    if void:
        group = replace(group, committed=committed, again=-1, finished=False)
    elif committed > group.again:
        # Steps that are made again are not recorded: what the record has says nothing of them.
        group = replace(group, committed=max(group.committed, committed))
    group = replace(group, durable=durable, workers=_workers(group, here, last))
    numbers: list[e.Event] = []
    for request in requests:
        if isinstance(request, e.Rescale):
            group, numbers = rescaled(group, request.minimum, request.maximum, request.spares), [request]
        else:
            group, _ = step(group, request)
    # With the numbers, those too many are told to leave: it is known then who is here.
    events = [*_joined(group, here, formed), *_out(group, here, last), *numbers]
    commands: list[e.Command] = [e.Dismiss(name) for name in survivors if name not in here]
    commands += [e.WarmUp(name) for name, worker in group.workers.items() if worker.state == "warming_up"]
    if not formed:
        # If this formation fails, it is because of the controller.
        group = replace(group, failures=group.failures - 1, unformed=group.unformed - 1)
    for event in events:
        group, more = step(group, event)
        commands += more
    return group, [due for command in commands for due in _still_due(group, command)]


def _belongs(group: Group, name: str, survivor: Survivor, void: bool) -> bool:
    """Return whether a worker is one of the group; else its end was decided and not carried out."""
    if survivor.generation < 0:
        return True
    # Nobody is inside once the run has gone back.
    inside = survivor.left is None
    return name in group.workers and not (inside and (void or survivor.generation < group.generation))


def _has_formed(group: Group, here: Mapping[str, Survivor], committed: int) -> bool:
    """Return whether all members were in the worlds of the generation: they all joined, or a step of it was made.

    A step has the sums of all members.
    """
    seated = [here.get(name) for name in group.seats]
    called = [one for one in seated if one is not None and one.generation == group.generation]
    if len(called) == len(seated) and all(one.joined for one in called):
        return True
    outcomes = [one.left for one in called if one.left is not None]
    made = [step for left in outcomes for step in (left.holds, left.ready, left.copy) if step is not None]
    if max(made, default=-1) > group.committed or committed > max(group.committed, group.again):
        return True
    return any(left.why in ("paused", "finished") for left in outcomes)


def _workers(group: Group, here: Mapping[str, Survivor], last: int) -> dict[str, WorkerStatus]:
    """Return the group's workers: its members as inside, also those that are gone, and the others that live.

    What they hold of steps after `last` does not count.
    """
    workers = {name: group.workers[name] for name in group.workers if name in group.seats or name in here}
    for name, survivor in here.items():
        known = workers.get(name, WorkerStatus("up"))
        copies = frozenset(
            (step, stage)
            for step, stage, made in survivor.copies
            # An older one that was not known is of steps that were undone.
            if (made >= group.generation or (step, stage) in known.copies) and step <= last
        )
        status = known if name in group.seats else _outside(known, survivor, last)
        workers[name] = replace(status, node=survivor.node, copies=copies)
    return workers


def _outside(known: WorkerStatus, survivor: Survivor, last: int) -> WorkerStatus:
    """Return the status of a worker that is no member.

    It holds what it was known to hold, if it still does: anything else may be of steps that were undone.
    """
    left, fresh = survivor.left, survivor.generation < 0
    held = known.state == "idle" and left is not None and _same(known, left)
    if held and (known.holds is None or known.holds <= last):
        return known
    # A fresh worker makes a warm-up step, whether or not it has made one: no state is its own afterwards.
    warm = not fresh or (left is not None and left.holds is None)
    return WorkerStatus("idle" if warm else "warming_up", leaving=known.leaving, unwanted=known.unwanted)


def _same(known: WorkerStatus, left: e.Left) -> bool:
    return (known.holds, known.stage, known.owned) == (left.holds, left.stage, left.owned)


def _joined(group: Group, here: Mapping[str, Survivor], formed: bool) -> list[e.Event]:
    """Return what members reported when they had joined."""
    generation = group.generation
    able = [name for name, one in here.items() if one.joined and one.generation == generation]
    return [e.Joined(name, generation) for name in group.seats if formed or name in able]


def _out(group: Group, here: Mapping[str, Survivor], last: int) -> list[e.Event]:
    """Return how members came out or were lost, in an order that interrupts as few as possible."""
    generation, left, lost = group.generation, list[e.Left](), list[e.Event]()
    for name in group.seats:
        if name not in here:
            lost.append(e.Lost(name, f"{name} was lost while there was no controller"))
        elif here[name].generation < generation:
            # It was not called. What it holds is known.
            held = group.workers[name]
            told = e.Left(name, generation, held.holds, "interrupted", stage=held.stage, owned=held.owned)
            left.append(replace(told, complete=held.complete))
        elif (outcome := here[name].left) is not None:
            left.append(_until(outcome, last))
    if left and len(left) + len(lost) == len(group.seats) and all(one.why in ("paused", "finished") for one in left):
        # The world has ended in order, and the others were lost later.
        lost = [event for name in group.seats if name not in here for event in _lost_outside(group, name)]
        return [*lost, *left]
    # The others follow from one that failed.
    return [*sorted(left, key=lambda one: one.why != "failed"), *lost]


def _lost_outside(group: Group, name: str) -> list[e.Event]:
    return [e.Left(name, group.generation, None, "paused"), e.Lost(name)]


def _until(left: e.Left, last: int) -> e.Left:
    """Return how a member came out, without what it holds of steps after `last`."""
    holds, ready, copy = (_at_most(step, last) for step in (left.holds, left.ready, left.copy))
    return replace(left, holds=holds, ready=ready, copy=copy)


def _at_most(step: int | None, last: int) -> int | None:
    return None if step is None or step > last else step


def _still_due(group: Group, command: e.Command) -> list[e.Command]:
    """Return the command, unless it asks members that are out for something."""
    if not isinstance(command, e.Pause | e.Interrupt):
        return [command]
    inside = members_in(group) if command.generation == group.generation else ()
    if isinstance(command, e.Interrupt):
        command = replace(command, workers=tuple(name for name in command.workers if name in inside))
    return [command] if inside else []
