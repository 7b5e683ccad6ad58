"""Drive the group's state machine through every order of events in a small world, and check its invariants.

The world is made of processes that start, join, step, die and answer. Messages are delivered in any order between
workers (in order from one), may be lost if the real ones may, and may come twice. The controller may die: what it knew
is gone, and another takes over the workers by what they say of themselves. Messages without any effect - from an
earlier generation, from an unknown worker, or from one that has left - are in no world's mail: instead every world
checks that the machine ignores them.
"""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import combinations
from random import Random
from typing import Any, NamedTuple

import numpy as np

from raytrain_plus.membership import adoption, state_machine
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Group, Limits, Phase, members_in, shape_for
from raytrain_plus.membership.mesh import Donor, Stage
from raytrain_plus.membership.pieces import union


class Violation(AssertionError):
    """A state or transition that must never occur was reached."""


class Proc(NamedTuple):
    """One process as it really is."""

    inside: int = -1
    """The generation it is inside of."""
    holds: int | None = None
    stage: Stage | None = None
    """The stage of the state that it holds; None for the initial state of any stage."""
    summed: bool = False
    """It has all sums of the step after that."""
    line: int = 0
    """The history of its state: recomputed steps begin another one."""
    before: tuple[int, Stage] | None = None
    """What it held when it began to take another stage, until that generation has made a step."""
    copying: bool = False
    interrupted: bool = False
    copies: tuple[tuple[int, Stage, int, int], ...] = ()
    """(step, stage, history, generation) of the copies that it also keeps."""
    called: int = -1
    """The newest generation that it was called into."""
    joined: bool = False
    """It was in the world of that generation, with the state."""
    why: e.Why = "paused"
    """How it came out of that."""


class Charter(NamedTuple):
    """What the members of one generation keep of it, and what the record says of the time since."""

    group: Group
    void_above: int | None = None
    """The lowest step to which the run has gone back since."""


class World(NamedTuple):
    """The whole world, and what may still happen."""

    group: Group
    procs: tuple[tuple[str, Proc], ...] = ()
    starting: tuple[str, ...] = ()
    mail: tuple[e.Event, ...] = ()
    """In flight, oldest first."""
    members: tuple[tuple[str, int | None], ...] = ()
    """The current generation's members and the steps they have applied; for dead ones their last."""
    summed: tuple[str, ...] = ()
    """The members, including dead ones, that have all sums of the step after the last one that they applied."""
    donors: tuple[Donor, ...] = ()
    """The workers that provide the state to members that lack it; one that is to leave is not a member."""
    begun: int = -1
    """The step whose state the current generation began with."""
    paused: int = -1
    """The generation that was asked to pause."""
    announced: int = -1
    """The highest step that was announced as committed."""
    capacity: int = 0
    deaths: int = 0
    arrivals: int = 0
    drains: int = 0
    doubles: int = 0
    losses: int = 0
    faults: int = 0
    lates: int = 0
    stops: int = 0
    saves: int = 0
    damages: int = 0
    copies: int = 0
    misfits: int = 0
    """How many partitions, the smallest first, may turn out too large for a worker before any world."""
    controllers: int = 0
    """How many controllers may die once a world is being formed. Before, no worker has a charter: all of them end, and
    the run begins again."""
    charters: tuple[Charter, ...] = ()
    """Those that any living worker keeps as its newest; none once no controller may die any more."""
    recorded: int = -1
    """The highest step that the record has as committed: it goes back when a view is formed."""
    wishes: tuple[tuple[int, int, int], ...] = ()
    """Numbers of workers - minimum, maximum, spares - that will be requested, in this order."""
    noticed: tuple[str, ...] = ()
    """Workers whose nodes will leave, as the group was told."""
    stopped: bool = False
    """The group was told to stop before it exported the model."""
    line: int = 0
    newest: int = -1
    """The highest step that anybody has applied in the current history."""
    alike: bool = False
    """Treat workers of which the same is known and true as one and the same.

    Then it is open which of several equally advanced workers provides its state; the machine's choice is among them.
    """


def explore(world: World, most: int = 2_000_000, look: Callable[[World], object] | None = None) -> dict[str, int]:
    """Visit every reachable world; return their number and the transitions taken. Raises `Violation`.

    `look` is called with each world, if it is given.
    """
    seen = {mark(world): 0}
    ends: list[int] = []
    sources, targets = array("I"), array("I")
    # The newest world is next: so few wait at any time.
    todo = [(0, world)]
    taken: dict[str, int] = {}
    while todo:
        number, here = todo.pop()
        if look is not None:
            look(here)
        if here.group.phase is Phase.END:
            ends.append(number)
            continue
        moved = False
        for after in _moves(here, taken):
            moved = True
            reached = mark(after)
            to = seen.get(reached)
            if to is None:
                if after.group is not here.group:
                    _refuses(after.group)
                if len(seen) >= most:
                    raise Violation(f"more than {most} worlds")
                to = seen[reached] = len(seen)
                todo.append((to, after))
            sources.append(number)
            targets.append(to)
        if not moved:
            raise Violation(f"no transition from {here}")
    going = _leading_to(ends, np.frombuffer(sources, np.uint32), np.frombuffer(targets, np.uint32), len(seen))
    if not going.all():
        raise Violation(f"the end cannot be reached from {int((~going).sum())} worlds")
    return {"worlds": len(seen), **taken}


def _leading_to(ends: Sequence[int], sources: Any, targets: Any, count: int) -> Any:
    """For each world, whether one of the ends can be reached from it."""
    going = np.zeros(count, bool)
    going[ends] = True
    while True:
        found = sources[going[targets] & ~going[sources]]
        if not len(found):
            return going
        going[found] = True


def wander(world: World, draw: Random, most: int = 20_000) -> int:
    """Take one random path to its end, through a world too large to be visited whole; return its length.

    Raises `Violation`, also if the path does not end.
    """
    for length in range(most):
        if world.group.phase is Phase.END:
            return length
        ways = list(_moves(world, {}))
        if not ways:
            raise Violation(f"no transition from {world}")
        before, world = world, draw.choice(ways)
        if world.group is not before.group:
            _refuses(world.group)
    raise Violation(f"a way of {most} moves that does not end, at {world}")


def first_world(
    limits: Limits,
    *,
    capacity: int,
    deaths: int = 0,
    arrivals: int = 0,
    drains: int = 0,
    doubles: int = 0,
    losses: int = 0,
    faults: int = 0,
    lates: int = 0,
    stops: int = 0,
    saves: int = 0,
    damages: int = 0,
    copies: int = 0,
    misfits: int = 0,
    controllers: int = 0,
    wishes: tuple[tuple[int, int, int], ...] = (),
    durable: int = -1,
    alike: bool = False,
) -> World:
    group, commands = state_machine.begin(limits, durable)
    world = World(
        group,
        capacity=capacity,
        deaths=deaths,
        arrivals=arrivals,
        drains=drains,
        doubles=doubles,
        losses=losses,
        faults=faults,
        lates=lates,
        stops=stops,
        saves=saves,
        damages=damages,
        copies=copies,
        misfits=misfits,
        controllers=controllers,
        wishes=wishes,
        announced=durable,
        recorded=durable,
        alike=alike,
    )
    return _obey(world, commands)


def mark(world: World) -> bytes:
    """Return the world's key, short enough to keep millions of them."""
    return blake2b(marshal.dumps(_key(world), 2), digest_size=16).digest()


def _key(world: World) -> Any:
    """Return what distinguishes worlds: names by place, generations by distance, nothing without further effect."""
    group = world.group
    generation, phase = group.generation, group.phase
    procs = dict(world.procs)
    # What the members of a world do depends on how far they are, until they are to leave it.
    going = any(proc.inside >= 0 and not proc.interrupted for proc in procs.values())
    members = dict(world.members) if going else {}
    givers = world.donors if going and any(proc.copying for proc in procs.values()) else ()
    said: dict[str | None, list[Any]] = {}
    for message in world.mail:
        # Only the order between messages of one worker counts.
        held = _number(getattr(message, "holds", getattr(message, "step", None)))
        ready, stage = getattr(message, "ready", None), getattr(message, "stage", None)
        what = type(message).__name__, held, getattr(message, "why", ""), _number(ready), _place(stage)
        said.setdefault(getattr(message, "worker", None), []).append(what)
    workers = []
    for place, name in enumerate(dict.fromkeys((*group.seats, *group.workers, *procs, *members))):
        known, proc = group.workers.get(name), procs.get(name)
        told: tuple[Any, ...] = ()
        real: tuple[Any, ...] = ()
        if known:
            joined = known.joined and phase is Phase.JOIN
            told = (
                known.state,
                _number(known.holds),
                (known.leaving, known.unwanted),
                joined,
                known.proved,
                name in world.noticed,
            )
            told += _place(known.stage), _number(known.ready)
            told += (tuple(sorted((step, _place(stage)) for step, stage in known.copies)),)
        if proc:
            held = proc.holds if going or not proc.copying else None
            real = proc.inside >= 0, _number(held), proc.copying and going, proc.interrupted
            real += _place(proc.stage), proc.summed, going and name in world.summed, proc.line == world.line
            real += ((-3, (-1, 0)) if proc.before is None else (proc.before[0], _place(proc.before[1])),)
            kept = ((step, _place(stage), line == world.line, made) for step, stage, line, made in proc.copies)
            real += (tuple(sorted((*copy, generation - made if world.charters else 0) for *copy, made in kept)),)
            if world.charters:
                real += generation - proc.called, proc.joined, proc.why
        lead = phase is Phase.CLOSE and name in dict(group.leads)
        seat = group.seats.index(name) if name in group.seats and group.shape.layout != (1, 1) else name in group.seats
        roles = seat, name in world.starting, [_place(stage) for giver, stage in givers if giver == name], lead
        applied = _number(members[name]) if name in members else -4
        workers.append((0 if world.alike else place, told, real, said.get(name, []), applied, roles))
    workers.sort()
    return (
        workers,
        phase.name,
        group.shape.sizes,
        min(group.unformed, 1),
        group.committed,
        group.durable,
        (group.again, group.recalled),
        group.kept,
        group.stopping,
        group.finished,
        bool(group.failure),
        tuple((at, fault, generation - before) for at, fault, before in group.faults),
        generation < 0,
        said.get(None, []),
        phase is Phase.PAUSE and world.paused == generation,
        world.announced,
        world.newest,
        world.capacity,
        world.stopped,
        (world.deaths, world.arrivals, world.drains, world.doubles, world.losses, world.faults, world.lates),
        (world.stops, world.saves, world.damages, world.copies, world.misfits, world.wishes),
        (group.limits.sizes.stage_counts, group.limits.sizes.minimum),
        (world.controllers, world.recorded, tuple(_charter_key(world, charter) for charter in world.charters)),
    )


def _charter_key(world: World, charter: Charter) -> Any:
    """Return what distinguishes charters: if workers are alike, those with the same numbers are treated as the same."""
    group, now = charter.group, world.group
    workers = []
    places = list(dict.fromkeys((*now.seats, *now.workers, *dict(world.procs))))
    for name in dict.fromkeys((*group.seats, *group.workers)):
        known = group.workers.get(name)
        told: tuple[Any, ...] = ()
        if known:
            told = known.state, _number(known.holds), known.leaving, known.unwanted, known.proved, _place(known.stage)
            told += (tuple(sorted((step, _place(stage)) for step, stage in known.copies)),)
        workers.append((name in group.seats, places.index(name) if name in places else -1, told))
    workers.sort()
    return (
        now.generation - group.generation,
        workers,
        group.shape.sizes,
        (group.committed, group.again, group.unformed, group.stopping, group.finished, group.failure),
        tuple((at, fault, group.generation - before) for at, fault, before in group.faults),
        charter.void_above,
    )


def _number(step: int | None) -> int:
    return -3 if step is None else step


def _place(stage: Stage | None) -> tuple[int, int, int]:
    return (-1, 0, 0) if stage is None else (stage.index, *stage.layout)


def _moves(world: World, taken: dict[str, int]) -> Iterator[World]:
    def took(what: str) -> None:
        taken[what] = taken.get(what, 0) + 1

    procs = dict(world.procs)
    # A worker's messages arrive in order; those of different workers in any order.
    heads: set[str | None] = set()
    for place, message in enumerate(world.mail):
        sender = getattr(message, "worker", None)
        if sender in heads:
            continue
        heads.add(sender)
        rest = world.mail[:place] + world.mail[place + 1 :]
        took(type(message).__name__)
        if isinstance(message, e.Saved) and message.step > world.announced:
            # The run has resumed from an earlier step meanwhile.
            yield world._replace(mail=rest)
            continue
        heard = world._replace(mail=rest)
        if isinstance(message, e.Notice):
            heard = heard._replace(noticed=(*world.noticed, message.worker))
        yield from _deliver(heard, message)
        if world.doubles and isinstance(message, (e.Ready, e.Joined, e.Left, e.Lost)):
            for after in _deliver(world._replace(mail=(*rest, message), doubles=world.doubles - 1), message):
                if message in after.mail:
                    took("doubled")
                    yield after
        # Found while it reads, and not when it reports again that it has read.
        if (
            world.damages
            and isinstance(message, e.Ready)
            and _number(message.holds) >= 0
            and world.group.workers[message.worker].state == "restoring"
        ):
            took("damaged")
            damaged = world
            if message.worker in procs:
                damaged = _with(world, message.worker, procs[message.worker]._replace(holds=None))
            damaged = damaged._replace(mail=rest, damages=world.damages - 1)
            yield from _deliver(damaged, e.Unreadable(message.worker, -1))
        if world.losses and isinstance(message, (e.Joined, e.Committed, e.Saved)):
            took("lost")
            yield world._replace(mail=rest, losses=world.losses - 1)
    if world.misfits and world.group.generation < 0 and len(world.group.limits.sizes.stage_counts) > 1:
        took("misfit")
        fitted = e.Fitted(world.group.limits.sizes.stage_counts[:-1], {})
        yield from _deliver(world._replace(misfits=world.misfits - 1), fitted)
    if world.wishes:
        took("rescale")
        minimum, maximum, spares = world.wishes[0]
        yield from _deliver(world._replace(wishes=world.wishes[1:]), e.Rescale(minimum, maximum, spares))
    room = _room(world)
    if world.starting and (room or world.arrivals):
        name, *others = world.starting
        came = (*world.procs, (name, Proc(holds=-1, line=world.line)))
        up = world._replace(procs=came, starting=tuple(others), mail=(*world.mail, e.Ready(name, -1)))
        if not room:
            # A node that arrives and hosts nobody changes nothing: it arrives when a worker starts there.
            took("arrival")
            up = up._replace(arrivals=world.arrivals - 1, capacity=world.capacity + 1)
        yield from _deliver(up, e.Up(name))
    applied = dict(world.members)
    generation = world.group.generation
    for name, proc in world.procs:
        if world.deaths:
            took("death")
            gone = tuple((other, entry) for other, entry in world.procs if other != name)
            yield world._replace(procs=gone, mail=(*world.mail, e.Lost(name)), deaths=world.deaths - 1)
        if (
            world.drains
            and name in world.group.workers
            and name not in world.noticed
            and e.Notice(name) not in world.mail
        ):
            took("drain")
            # No other will start in its place.
            left = world._replace(drains=world.drains - 1, noticed=(*world.noticed, name), capacity=world.capacity - 1)
            yield from _deliver(left, e.Notice(name))
        if proc.inside != generation or proc.inside < 0:
            continue
        formed = all(member not in procs or procs[member].inside == generation for member in applied)
        peers_gone = any(member not in procs for member in applied)
        if proc.interrupted or peers_gone:
            took("interrupted")
            yield _interrupted(world, name)
            if proc.interrupted:
                continue
        if proc.copying:
            stage = _stage_of(world, name)
            pieces = world.group.limits.pieces
            givers = [giver for giver, given in world.donors if pieces(given) & pieces(stage)]
            if not all(giver in procs for giver in givers) and not peers_gone:
                took("interrupted")
                yield _interrupted(world, name)
            if formed and not peers_gone and all(giver in procs for giver in givers):
                took("copied")
                donor_holds = world.begun
                done = proc._replace(copying=False, joined=True, holds=donor_holds, stage=stage, line=world.line)
                yield _with(
                    world._replace(
                        mail=(*world.mail, e.Joined(name, generation)),
                        members=tuple((m, donor_holds if m == name else s) for m, s in world.members),
                    ),
                    name,
                    done,
                )
            continue
        if any(member in procs and procs[member].copying for member in applied):
            continue
        step = applied[name]
        assert step is not None
        if step == world.group.limits.steps - 1:
            yield _leave(world, name, _left(world, name, step, "finished"))
            continue
        # A worker that left because of a fault is at no boundary with the others.
        level = all(
            other == step and procs[member].inside == generation for member, other in applied.items() if member in procs
        )
        if world.paused == generation and level and not peers_gone and not world.summed:
            took("paused")
            after = world
            for member in applied:
                after = _leave(after, member, _left(after, member, step, "paused"))
            yield after
        if world.faults and not peers_gone:
            took("fault")
            failed = replace(_left(world, name, None, "failed"), fault="oops")
            yield _leave(world._replace(faults=world.faults - 1), name, failed)
        if not all(other is not None and other >= step for other in applied.values()):
            continue
        if world.group.shape.layout != (1, 1) and name not in world.summed:
            took("summed")
            yield _with(world._replace(summed=(*world.summed, name)), name, proc._replace(summed=True))
        elif world.group.shape.layout == (1, 1) or all(
            member in world.summed or _number(other) > step for member, other in applied.items()
        ):
            took("applied")
            yield from _apply(world, name, proc, step + 1)
    if world.charters:
        took("controller")
        yield from _taken_over(world)
    phase = world.group.phase
    if world.lates and phase in (Phase.JOIN, Phase.TRAIN, Phase.PAUSE, Phase.LEAVE):
        took("late")
        yield from _deliver(world._replace(lates=world.lates - 1), e.Late(generation))
    if world.saves and world.announced > world.group.durable and phase is not Phase.END:
        took("saved")
        yield from _deliver(world._replace(saves=world.saves - 1), e.Saved(world.announced))
    if world.copies:
        for after in _copied(world):
            took("kept")
            yield after
    if world.stops:
        took("stop")
        yield from _deliver(world._replace(stops=world.stops - 1, stopped=True), e.Stop())
    if not world.mail and not (room and world.starting) and phase in (Phase.GATHER, Phase.JOIN, Phase.CLOSE):
        yield from _deliver(world, e.Late(generation))


def _copied(world: World) -> Iterator[World]:
    """Each member's state after a step that all have applied is now also in the memory of a neighbour or a spare."""
    group, procs = world.group, dict(world.procs)
    names, steps = [name for name, _ in world.members], [step for _, step in world.members]
    if group.shape.replicas > 1 or group.phase not in (Phase.JOIN, Phase.TRAIN, Phase.PAUSE, Phase.LEAVE):
        return
    spares = [name for name, worker in group.workers.items() if worker.state == "idle" and name not in names]
    others = names if len(names) > 1 else [*names, *spares[:1]]
    if None in steps or len(others) < 2:
        return
    step = min(step for step in steps if step is not None)
    had = max((copy[0] for name in procs for copy in procs[name].copies if copy[2] == world.line), default=-1)
    if not had < step <= world.announced:
        return
    copies: dict[str, list[Stage]] = {}
    for seat, name in enumerate(names):
        copies.setdefault(name, []).append(group.shape.stage(seat))
        copies.setdefault(others[(seat + 1) % len(others)], []).append(group.shape.stage(seat))
    for name, proc in procs.items():
        kept = tuple((step, stage, world.line, group.generation) for stage in copies.get(name, ()))
        world = _with(world, name, proc._replace(copies=kept))
    told = {name: tuple(stages) for name, stages in copies.items()}
    yield from _deliver(world._replace(copies=world.copies - 1), e.Copied(group.generation, step, told))


def _room(world: World) -> bool:
    return sum(name not in world.noticed for name, _ in world.procs) < world.capacity


def _apply(world: World, name: str, proc: Proc, step: int) -> Iterator[World]:
    members = tuple((m, step if m == name else s) for m, s in world.members)
    summed = tuple(member for member in world.summed if member != name)
    stage = _stage_of(world, name)
    proc = proc._replace(holds=step, stage=stage, summed=False, before=None)
    after = _with(world._replace(members=members, summed=summed, newest=max(world.newest, step)), name, proc)
    steps = [s for _, s in members if s is not None]
    proven = max(min(steps), max(steps) - 1)
    if proven > world.announced and len(steps) == len(members):
        # The proof was reported before anything else that these workers will send.
        after = after._replace(announced=proven, recorded=proven)
        yield from _deliver(after, e.Committed(world.group.generation, proven))
    else:
        yield after


def _with(world: World, name: str, proc: Proc) -> World:
    return world._replace(procs=tuple((other, proc if other == name else entry) for other, entry in world.procs))


def _left(world: World, name: str, holds: int | None, why: e.Why) -> e.Left:
    """Return a member's message when it comes out: the step and stage that it holds."""
    proc = dict(world.procs)[name]
    ready = holds + 1 if proc.summed and holds is not None else None
    return e.Left(name, world.group.generation, holds, why, stage=proc.stage, ready=ready)


def _interrupted(world: World, name: str) -> World:
    """A member leaves a broken world, with its previous state if it has less than that now."""
    proc = dict(world.procs)[name]
    holds = None if proc.copying else proc.holds
    if proc.before is not None:
        step, stage = proc.before
        if holds != step or proc.stage is None or _positions(proc.stage.layout) > _positions(stage.layout):
            holds = step
            world = _with(world, name, proc._replace(stage=stage))
    return _leave(world, name, _left(world, name, holds, "interrupted"))


def _leave(world: World, name: str, message: e.Left) -> World:
    proc = dict(world.procs)[name]
    proc = proc._replace(inside=-1, holds=message.holds, before=None, copying=False, interrupted=False, why=message.why)
    return _with(world._replace(mail=(*world.mail, message)), name, proc)


def _stage_of(world: World, name: str) -> Stage:
    return world.group.shape.stage(world.group.seats.index(name))


def _deliver(world: World, event: e.Event) -> Iterator[World]:
    before = world.group
    group, commands = state_machine.step(before, event)
    _check(world, event, group, commands)
    if group.committed < before.committed and group.again < world.announced:
        world = world._replace(announced=group.committed)
    mail = tuple(message for message in world.mail if _counts(group, message))
    world = world._replace(group=group, mail=mail)
    yield from _carried_out(world, commands)


def _carried_out(world: World, commands: list[e.Command]) -> Iterator[World]:
    """Carry out the commands, or some of them, and then the controller dies."""
    yield _obey(world, commands)
    if world.alike:
        for other, command in _equals(world.group, commands):
            yield _obey(world._replace(group=other), [*commands[:-1], command])
    if not world.controllers:
        return
    for count, command in enumerate(commands):
        before = _obey(world, commands[:count])
        if count:
            yield from _taken_over(before)
        if not isinstance(command, e.Join):
            continue
        if (written := _record(before, command)) != before:
            yield from _taken_over(written)
        names = [member.worker for member in command.view.members]
        for size in range(1, len(names)):
            for called in combinations(names, size):
                yield from _taken_over(_join(before, command, called))


def _taken_over(world: World) -> Iterator[World]:
    """Another controller takes over the living workers, unless none of them has a charter: then it begins again."""
    procs = dict(world.procs)
    called = {proc.called for proc in procs.values()}
    charters = [one for one in world.charters if one.group.generation in called]
    if not charters:
        return
    numbers, noticed = world.group.limits, [name for name in world.noticed if name in procs]
    requests: list[e.Stop | e.Rescale | e.Notice] = [e.Stop()] if world.group.stopping else []
    if numbers != charters[-1].group.limits:
        requests.append(e.Rescale(numbers.sizes.minimum, numbers.sizes.maximum, numbers.spares))
    # A checkpoint that was being written may be completed, or not.
    saved = tuple(message for message in world.mail if isinstance(message, e.Saved))
    for mail in dict.fromkeys([(), saved]):
        # It is known at once whose nodes will leave, or only later.
        for told in dict.fromkeys([(), tuple(noticed)]):
            late = tuple(e.Notice(name) for name in noticed if name not in told)
            alone = world._replace(
                controllers=world.controllers - 1,
                charters=tuple(charters),
                mail=(*mail, *late),
                noticed=told,
                starting=(),
                announced=world.recorded,
            )
            now = [*requests, *map(e.Notice, told)]
            yield from _adopted(alone, now)
            # What members were to take may have been lost with the controller.
            cut = tuple(
                (name, proc._replace(interrupted=proc.interrupted or proc.copying)) for name, proc in alone.procs
            )
            if cut != alone.procs:
                yield from _adopted(alone._replace(procs=cut), now)


def _adopted(world: World, requests: Sequence[e.Stop | e.Rescale | e.Notice]) -> Iterator[World]:
    newest = max(world.charters, key=lambda one: one.group.generation)
    group, commands = adoption.adopt(
        newest.group,
        {name: _survivor(proc, name) for name, proc in world.procs},
        committed=world.recorded,
        durable=world.group.durable,
        named=world.group.named,
        void_above=newest.void_above,
        requests=requests,
    )
    _check_adopted(world, newest.group, group, commands)
    if group.committed < world.recorded and group.again < world.announced:
        world = world._replace(announced=group.committed)
    if all(proc.inside < 0 for _, proc in world.procs):
        # A generation that no living worker was in may be formed again.
        world = world._replace(paused=-1)
    if not world.controllers:
        world = world._replace(charters=())
    mail = tuple(message for message in world.mail if _counts(group, message))
    yield from _carried_out(world._replace(group=group, mail=mail), commands)


def _survivor(proc: Proc, name: str) -> adoption.Survivor:
    """Return what a worker says of itself."""
    ready = proc.holds + 1 if proc.summed and proc.holds is not None else None
    fault = "oops" if proc.why == "failed" else ""
    left = e.Left(name, proc.called, proc.holds, proc.why, fault, stage=proc.stage, ready=ready)
    return adoption.Survivor(
        node="",
        generation=proc.called,
        joined=proc.joined,
        left=None if proc.inside >= 0 else left,
        copies=frozenset((step, stage, made) for step, stage, _, made in proc.copies),
    )


def _check_adopted(world: World, charter: Group, group: Group, commands: list[e.Command]) -> None:
    """Raise `Violation` if the group is not what the living workers are."""
    procs = dict(world.procs)
    ended = {command.worker for command in commands if isinstance(command, e.Dismiss)}
    started = {name for command in commands if isinstance(command, e.Start) for name in command.workers}
    if set(group.workers) != (procs.keys() - ended) | (started - ended):
        raise Violation(f"{sorted(group.workers)} of {sorted(procs)} are adopted")
    joins = [command for command in commands if isinstance(command, e.Join)]
    told = {name for command in commands if isinstance(command, e.Finish | e.Recall) for name in command.workers}
    inside = {name for name, proc in procs.items() if proc.inside >= 0}
    if inside & ended or (inside if joins else inside ^ (set(members_in(group)) - told)):
        raise Violation(f"{inside} are inside, and {members_in(group)} are taken to be; {commands}")
    if any(procs[name].inside != group.generation for name in inside):
        raise Violation(f"{inside} are in other generations than {group.generation}")
    if group.phase in (Phase.TRAIN, Phase.PAUSE) and not all(procs[name].joined for name in inside):
        raise Violation("it trains, though not all have joined")
    if group.phase is Phase.JOIN and not joins and all(procs[name].joined for name in inside):
        raise Violation("it forms a world, though all have joined")
    for name, worker in group.workers.items():
        proc = procs.get(name, Proc())
        if worker.state == "idle" and worker.holds is not None:
            held = proc.holds, proc.stage if worker.holds >= 0 else worker.stage
            if held != (worker.holds, worker.stage) or (worker.holds >= 0 and proc.line != world.line):
                raise Violation(f"{name} is taken to hold {worker.holds}, {worker.stage}; it is {proc}")
        if not all(_keeps(proc, *copy, world.line) for copy in worker.copies):
            raise Violation(f"{name} is taken to keep {worker.copies}; it is {proc}")
    if group.committed > world.recorded and not joins:
        raise Violation(f"{group.committed} is taken for committed, and {world.recorded} is")
    # Steps that are made again are recorded, and count only once they are.
    _check_after(world, group, commands, world.recorded if world.recorded > charter.again else charter.committed)


def _check(world: World, event: e.Event, group: Group, commands: list[e.Command]) -> None:
    """Raise `Violation` if `event` led to something that must not occur."""
    before = world.group
    if group.phase not in state_machine.TABLE[before.phase, type(event)].leads:
        raise Violation(f"{type(event).__name__} led from {before.phase.name} to {group.phase.name}")
    if group.generation not in (before.generation, before.generation + 1):
        raise Violation(f"the generation went from {before.generation} to {group.generation}")
    ended = [command.status for command in commands if isinstance(command, e.End)]
    idle = [worker for worker in before.workers.values() if worker.state == "idle" and not worker.leaving]
    enough = len(idle) >= before.limits.sizes.fewest and shape_for(before, len(idle)) is not None
    if ended == ["failed"] and before.phase is Phase.GATHER and enough:
        raise Violation(f"given up ({group.failure}), though there are workers enough")
    _check_after(world, group, commands, before.committed, event)


def _check_after(
    world: World, group: Group, commands: list[e.Command], committed: int, event: e.Event | None = None
) -> None:
    """Raise `Violation` if the group must not be so, after `event` or a controller's death.

    `committed`: the step that was committed before.
    """
    what = "a takeover" if event is None else type(event).__name__
    if group.committed < committed:
        _check_back(world, group, committed, event)
    ended = [command.status for command in commands if isinstance(command, e.End)]
    announced = min(world.announced, group.committed)
    if ended and not isinstance(event, e.Handed | e.Late) and 0 <= announced <= _held(world.procs):
        raise Violation(f"given up ({group.failure}), though the state is held")
    if ended == ["finished"] and not isinstance(event, e.Handed):
        raise Violation("finished, and nobody has exported the model")
    if world.stopped and group.phase in (Phase.GATHER, Phase.TRAIN):
        raise Violation(f"{what} led to {group.phase.name} after a stop")
    if group.phase is Phase.TRAIN and any(name in world.noticed for name in members_in(group)):
        others = [worker for name, worker in group.workers.items() if name not in world.noticed]
        if sum(worker.state in ("idle", "in") for worker in others) >= group.limits.sizes.fewest:
            raise Violation("one that is to leave trains on, though there are others enough")


def _check_back(world: World, group: Group, committed: int, event: e.Event | None) -> None:
    """Raise `Violation` if the group went back too far, or needlessly, from the step that was committed."""
    if group.committed < group.durable:
        raise Violation(f"back to {group.committed}, though there is a checkpoint of {group.durable}")
    # A worker that does not report in time that it left is dismissed, whatever it holds.
    known = [one for one in world.procs if (worker := group.workers.get(one[0])) and worker.state != "restoring"]
    if not isinstance(event, e.Late) and _held(known) >= committed:
        raise Violation(f"committed steps were forgotten, though {_held(known)} is held")
    had = _had(known, world.line)
    if not isinstance(event, e.Late) and group.committed < had:
        raise Violation(f"back to {group.committed}, though there are copies of {had}")
    ends = group.stopping or bool(group.failure)
    if group.committed == had > group.durable and group.again < world.announced and not ends:
        raise Violation(f"steps above {had} are undone, though there are copies")


def _refuses(group: Group) -> None:
    """Raise `Violation` if an outdated message, an unknown worker's, or a repeated one has an effect."""
    old, nobody = group.generation - 1, f"worker-{group.named}"
    said: list[e.Event] = [e.Committed(old, 99), e.Late(old), e.Stuck(old), e.Up(nobody), e.Ready(nobody, 0)]
    said += [e.Lost(nobody), e.Notice(nobody), e.Unreadable(nobody, -1), e.CopyMissing(nobody)]
    for name in group.workers:
        said += [e.Joined(name, old), e.Left(name, old, 0, "interrupted")]
        said += [e.Joined(name, group.generation), e.Left(name, group.generation, 0, "interrupted")]
    for message in (message for message in said if not _counts(group, message)):
        if state_machine.step(group, message) != (group, []):
            raise Violation(f"{message} had an effect")


def _counts(group: Group, message: e.Event) -> bool:
    """Return whether a message may have an effect, now or later; `_refuses` checks that the others have none."""
    worker = getattr(message, "worker", None)
    if worker is not None and worker not in group.workers:
        return False
    if getattr(message, "generation", group.generation) != group.generation:
        return False
    if isinstance(message, e.Joined | e.Left) and group.workers[message.worker].state != "in":
        return False
    return not isinstance(message, e.Joined) or group.phase is Phase.JOIN


def _equals(group: Group, commands: list[e.Command]) -> Iterator[tuple[Group, e.Command]]:
    """Yield the alternatives if the machine has chosen one of several equally advanced workers."""
    last = commands[-1] if commands else None
    if not isinstance(last, e.HandOver) and not (
        isinstance(last, e.Join) and set(last.lacks.values()) & {"newer", "stage"}
    ):
        return
    [(best, stage)] = last.donors
    chosen = group.workers[best]
    for name, worker in group.workers.items():
        able = worker.state in ("idle", "in") and (worker.holds, worker.leaving) == (chosen.holds, chosen.leaving)
        if not able or name == best:
            continue
        if isinstance(last, e.Join):
            yield group, replace(last, donors=((name, stage),))
        else:
            yield replace(group, leads=((name, stage),)), e.HandOver(((name, stage),), last.step)


def _obey(world: World, commands: list[e.Command]) -> World:
    for command in commands:
        procs = dict(world.procs)
        if isinstance(command, e.Start):
            world = world._replace(starting=(*world.starting, *command.workers))
        elif isinstance(command, e.Join):
            world = _join(world, command)
        elif isinstance(command, e.Interrupt):
            for name in command.workers:
                if name in procs and procs[name].inside == command.generation:
                    world = _with(world, name, procs[name]._replace(interrupted=True))
        elif isinstance(command, e.Pause):
            world = world._replace(paused=command.generation)
        elif isinstance(command, e.Dismiss):
            left = tuple((name, proc) for name, proc in world.procs if name != command.worker)
            starting = tuple(name for name in world.starting if name != command.worker)
            world = world._replace(procs=left, starting=starting)
        elif isinstance(command, e.Finish):
            world = _finish(world, command)
        elif isinstance(command, e.Recall):
            for name in command.workers:
                if name in procs:
                    world = _recall(world, name, command.step)
        elif isinstance(command, e.WarmUp):
            if command.worker in procs:
                world = _with(world, command.worker, procs[command.worker]._replace(holds=None))
                world = world._replace(mail=(*world.mail, e.Ready(command.worker, None)))
        elif isinstance(command, e.Restore):
            if command.step != world.group.durable:
                raise Violation(f"{command.worker} reads step {command.step}, not {world.group.durable}")
            if command.worker in procs:
                # A checkpoint exists only for steps that are never recomputed.
                read = procs[command.worker]._replace(
                    holds=command.step, stage=command.stage, summed=False, line=world.line, why="interrupted"
                )
                world = _with(world, command.worker, read)
                world = world._replace(mail=(*world.mail, e.Ready(command.worker, command.step, command.stage)))
        elif isinstance(command, e.Keep):
            idle = [w for w in world.group.workers.values() if w.state == "idle" and w.holds == command.step]
            if {w.stage for w in idle} == {w.stage for w in idle if not w.leaving}:
                raise Violation(f"a checkpoint of step {command.step}, which is held by those who stay")
            world = world._replace(mail=(*world.mail, e.Saved(command.step)))
        elif isinstance(command, e.HandOver) and all(name in procs for name, _ in command.donors):
            _check_whole(world, command.donors)
            had = [_steps(procs[name], stage) for name, stage in command.donors]
            held, committed = set.intersection(*had), min(world.announced, world.group.committed)
            if not held or max(held) < committed:
                raise Violation(f"{command.donors} hand over {had}, though {committed} is committed")
            world = world._replace(mail=(*world.mail, e.Handed()))
    return world


def _steps(proc: Proc, stage: Stage) -> set[int]:
    """Return the steps of which it has that stage, held or copied."""
    held = {proc.holds} if proc.holds is not None and proc.stage in (None, stage) else set()
    return held | {step for step, copied, *_ in proc.copies if copied == stage}


def _check_whole(world: World, donors: Sequence[Donor]) -> None:
    pieces = world.group.limits.pieces
    if pieces(Stage()) - union(pieces(stage) for _, stage in donors):
        raise Violation(f"{donors} do not have the whole state")


def _held(procs: Sequence[tuple[str, Proc]]) -> int:
    """Return the newest step of which workers in no world hold every stage, or can apply it."""
    out = [proc for _, proc in procs if proc.inside < 0 and proc.holds is not None]
    newest = max((_number(proc.holds) for proc in out), default=-3)
    found: dict[tuple[int, tuple[int, int]], set[int]] = {}
    for proc in out:
        held = _number(proc.holds) + (proc.summed and _number(proc.holds) + 1 == newest)
        if proc.stage is not None:
            found.setdefault((held, proc.stage.layout), set()).add(proc.stage.index)
    return max((held for (held, layout), have in found.items() if len(have) == _positions(layout)), default=-2)


def _had(procs: Sequence[tuple[str, Proc]], line: int) -> int:
    """Return the newest step of which workers in no world keep copies of every stage."""
    found: dict[tuple[int, tuple[int, int]], set[int]] = {}
    for step, stage, history, _ in (copy for _, proc in procs if proc.inside < 0 for copy in proc.copies):
        if history == line:
            found.setdefault((step, stage.layout), set()).add(stage.index)
    return max((step for (step, layout), have in found.items() if len(have) == _positions(layout)), default=-2)


def _positions(layout: tuple[int, int]) -> int:
    return layout[0] * layout[1]


def _recall(world: World, name: str, step: int) -> World:
    proc = dict(world.procs)[name]
    if not _keeps(proc, step, proc.stage, world.line):
        raise Violation(f"{name} has no copy of step {step}")
    world = _with(world, name, proc._replace(holds=step, summed=False, line=world.line, why="interrupted"))
    told = e.Left(name, world.group.generation, step, "interrupted", stage=proc.stage)
    return world._replace(mail=(*world.mail, told))


def _keeps(proc: Proc, step: int, stage: Stage | None, line: int) -> bool:
    return (step, stage, line) in [copy[:3] for copy in proc.copies]


def _finish(world: World, command: e.Finish) -> World:
    for name in command.workers:
        proc = dict(world.procs).get(name)
        if proc is None:
            continue
        if not proc.summed or _number(proc.holds) + 1 != command.step:
            raise Violation(f"{name} holds {proc.holds}, and is to apply {command.step}")
        # It may have died since, but it has reported that before.
        if not any(worker.state == "idle" and worker.holds == command.step for worker in world.group.workers.values()):
            raise Violation(f"{name} is to apply {command.step}, which nobody else has")
        world = _with(world, name, proc._replace(holds=command.step, summed=False, why="interrupted"))
        told = e.Left(name, command.generation, command.step, "interrupted", stage=proc.stage)
        world = world._replace(mail=(*world.mail, told))
    return world


def _record(world: World, command: e.Join) -> World:
    """The record says that the run goes back, if it does."""
    step = command.first_step - 1
    if command.again or step >= world.recorded:
        return world._replace(recorded=max(step, world.recorded))
    void = [step if one.void_above is None else min(step, one.void_above) for one in world.charters]
    charters = tuple(one._replace(void_above=above) for one, above in zip(world.charters, void, strict=True))
    return world._replace(recorded=step, charters=charters)


def _join(world: World, command: e.Join, called: Collection[str] | None = None) -> World:
    """Form a view; `called`: those of its members that are called into it, all without."""
    world = _record(world, command)
    procs = dict(world.procs)
    sizes, view = world.group.limits.sizes, command.view
    names = [member.worker for member in view.members]
    for position in range(_positions(view.shape.layout)):
        hosted = [
            shard
            for seat, member in enumerate(view.members)
            if view.shape.stage(seat).index == position
            for shard in member.shards
        ]
        if sorted(hosted) != list(range(sizes.shards)):
            raise Violation("not every shard has one host")
    if len(set(names)) != len(names) or not sizes.fewest <= len(names) <= sizes.maximum:
        raise Violation(f"a view of {names}")
    if view.shape.layout not in sizes.layouts or view.shape.size != len(names):
        raise Violation(f"a view of {names} in {view.shape}")
    if world.stopped:
        raise Violation(f"{names} form a view after a stop")
    for name in names:
        if name in world.noticed:
            raise Violation(f"{name}, which is to leave, is in a new view")
    if world.alike and any(worker.state == "idle" and not worker.leaving for worker in world.group.workers.values()):
        raise ValueError("if some are held back, workers are not alike")
    if command.first_step <= world.announced and not command.again:
        raise Violation(f"step {command.first_step} would be done again, and {world.announced} is committed")
    if command.again and command.first_step > world.announced:
        raise Violation(f"step {command.first_step} was never made, and nothing would be announced of it")
    for name, proc in procs.items():
        if proc.inside >= 0:
            raise Violation(f"{name} is inside {proc.inside} while {view.generation} forms")
    if command.first_step <= world.newest:
        kept = {
            name: proc.line == world.line and _number(proc.holds) < command.first_step for name, proc in world.procs
        }
        world = world._replace(line=world.line + 1, newest=command.first_step - 1)
        for name, proc in world.procs:
            copies = tuple(
                (step, stage, world.line if line + 1 == world.line and step < command.first_step else -1, made)
                for step, stage, line, made in proc.copies
            )
            world = _with(world, name, proc._replace(line=world.line if kept[name] else -1, copies=copies))
        procs = dict(world.procs)
    if command.donors:
        _check_whole(world, command.donors)
    for name, stage in command.donors:
        if name in procs and _keeps(procs[name], command.first_step - 1, stage, world.line):
            continue
        if name in procs and procs[name].line != world.line:
            raise Violation(f"the donor {name} holds what others have made again")
        if name in procs and (procs[name].holds, procs[name].stage) != (command.first_step - 1, stage):
            raise Violation(f"the donor {name} holds {procs[name].holds}, not {command.first_step - 1}")
    for seat, name in enumerate(names):
        if name not in procs or (called is not None and name not in called):
            continue
        proc, stage, lacks = procs[name], view.shape.stage(seat), command.lacks.get(name)
        if lacks is None and (proc.holds, proc.line) != (command.first_step - 1, world.line):
            raise Violation(f"{name} would continue from {proc.holds} of another history")
        if lacks is None and proc.stage not in (None, stage):
            raise Violation(f"{name} would start step {command.first_step} from {proc.holds}")
        copying = lacks in ("newer", "stage")
        before = None
        if lacks == "stage":
            if proc.holds is None or proc.stage is None:
                raise Violation(f"{name} holds nothing that it could keep")
            before = proc.holds, proc.stage
        proc = proc._replace(inside=view.generation, copying=copying, interrupted=False, summed=False, before=before)
        proc = proc._replace(called=view.generation, joined=not copying)
        if not copying:
            if lacks == "initial":
                proc = proc._replace(holds=-1, line=world.line)
            proc = proc._replace(stage=stage)
            world = world._replace(mail=(*world.mail, e.Joined(name, view.generation)))
        world = _with(world, name, proc)
    step = command.first_step - 1
    members = tuple((name, None if command.lacks.get(name) in ("newer", "stage") else step) for name in names)
    # The step that its members continue from is announced as committed: a living worker holds it.
    announced = max(world.announced, step)
    procs = dict(world.procs)
    world = world._replace(procs=tuple((name, proc._replace(summed=False)) for name, proc in procs.items()))
    if world.controllers:
        newest = {proc.called for proc in procs.values()}
        charters = (*world.charters, Charter(world.group))
        world = world._replace(charters=tuple(one for one in charters if one.group.generation in newest))
    return world._replace(members=members, summed=(), donors=command.donors, announced=announced, begun=step)
