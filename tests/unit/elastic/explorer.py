"""Drives the group's machine through every order of events in a small world, and checks what must always hold.

The world is made of processes that come up, join, step, die and answer; messages are delivered in any order between
workers (in order from one), may be lost where the real ones may, and may come twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from raytrain_plus.elastic import events as e
from raytrain_plus.elastic import machine
from raytrain_plus.elastic.group import Group, Limits, Phase


class Violation(AssertionError):
    """Something that must never be has been reached."""


@dataclass(frozen=True, slots=True)
class Proc:
    """One process as it really is."""

    inside: int = -1
    """The generation it is inside of."""
    holds: int | None = None
    copying: bool = False
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class World:
    group: Group
    procs: tuple[tuple[str, Proc], ...] = ()
    starting: tuple[str, ...] = ()
    mail: tuple[e.Event, ...] = ()
    """In flight, oldest first."""
    members: tuple[tuple[str, int | None], ...] = ()
    """The present generation's members and the steps they have applied, the dead ones' last."""
    donor: str = ""
    """Who gives the state to the members that lack it; no member itself where it is to leave."""
    paused: int = -1
    """The generation that was asked to pause."""
    announced: int = -1
    """The highest step that was told to be committed."""
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


def explore(world: World, most: int = 2_000_000) -> dict[str, int]:
    """Visits every world that can be reached; how many, and what was taken. Raises `Violation`."""
    seen = {_key(world)}
    ends: set[Any] = set()
    back: dict[Any, list[Any]] = {}
    queue = deque([world])
    taken: dict[str, int] = {}
    while queue:
        here = queue.popleft()
        key = _key(here)
        if here.group.phase is Phase.END:
            ends.add(key)
            continue
        moved = False
        for after in _moves(here, taken):
            moved = True
            to = _key(after)
            back.setdefault(to, []).append(key)
            if to not in seen:
                if len(seen) >= most:
                    raise Violation(f"more than {most} worlds")
                seen.add(to)
                queue.append(after)
        if not moved:
            raise Violation(f"no way on from {here}")
    # From everywhere the end can be reached.
    alive = set(ends)
    todo = deque(ends)
    while todo:
        for before in back.get(todo.popleft(), ()):
            if before not in alive:
                alive.add(before)
                todo.append(before)
    if alive != seen:
        raise Violation(
            f"the end cannot be reached from {len(seen - alive)} worlds, such as {next(iter(seen - alive))}"
        )
    return {"worlds": len(seen), **taken}


def wander(world: World, draw: Random, most: int = 20_000) -> int:
    """Takes one way by chance, to its end, through a world that is too large to be visited whole; its length.

    Raises `Violation`, also where the way does not end.
    """
    for length in range(most):
        if world.group.phase is Phase.END:
            return length
        ways = list(_moves(world, {}))
        if not ways:
            raise Violation(f"no way on from {world}")
        world = draw.choice(ways)
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
    durable: int = -1,
) -> World:
    group, commands = machine.begin(limits, durable)
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
        announced=durable,
    )
    return _obey(world, commands)


def _key(world: World) -> Any:
    """What tells worlds apart: names by place, generations by distance, counts that only bound retries left out."""
    group = world.group
    names: dict[str, int] = {}
    for name in (*group.seats, *group.workers, *(name for name, _ in world.procs), *world.starting):
        names.setdefault(name, len(names))

    def spelled(message: Any) -> Any:
        kind = type(message).__name__
        worker = getattr(message, "worker", None)
        if worker is None:
            return (kind,)
        at = names.setdefault(worker, len(names))
        stale = group.generation - getattr(message, "generation", group.generation)
        return kind, at, stale, getattr(message, "holds", None), getattr(message, "why", None)

    # Only the order between messages of one worker counts.
    mail = sorted((spelled(message) for message in world.mail), key=lambda entry: entry[1] if len(entry) > 1 else -1)
    return (
        group.phase,
        len(group.seats),
        tuple(
            sorted((names[name], w.state, w.holds, w.leaving, w.joined, w.proved) for name, w in group.workers.items())
        ),
        min(group.unformed, 1),
        group.committed,
        group.durable,
        group.kept,
        names.get(group.lead),
        group.stopping,
        group.finished,
        bool(group.failure),
        tuple((at, fault, group.generation - generation) for at, fault, generation in group.faults),
        group.generation < 0,
        tuple(
            sorted(
                (
                    names[name],
                    group.generation - proc.inside if proc.inside >= 0 else -1,
                    proc.holds,
                    proc.copying,
                    proc.interrupted,
                )
                for name, proc in world.procs
            )
        ),
        tuple(names[name] for name in world.starting),
        tuple(mail),
        tuple((names.get(name), held) for name, held in world.members),
        names.get(world.donor) if any(proc.copying for _, proc in world.procs) else None,
        world.paused == group.generation,
        world.announced,
        world.capacity,
        (world.deaths, world.arrivals, world.drains, world.doubles, world.losses, world.faults, world.lates),
        (world.stops, world.saves, world.damages),
    )


def _moves(world: World, taken: dict[str, int]) -> Iterator[World]:
    def took(what: str) -> None:
        taken[what] = taken.get(what, 0) + 1

    procs = dict(world.procs)
    # A worker's messages arrive in order; those of different workers in any.
    heads: set[str | None] = set()
    for place, message in enumerate(world.mail):
        sender = getattr(message, "worker", None)
        if sender in heads:
            continue
        heads.add(sender)
        rest = world.mail[:place] + world.mail[place + 1 :]
        took(type(message).__name__)
        if isinstance(message, e.Saved) and message.step > world.announced:
            # The run has gone on from an earlier one meanwhile.
            yield replace(world, mail=rest)
            continue
        yield _deliver(replace(world, mail=rest), message)
        if world.doubles and isinstance(message, (e.Warm, e.Joined, e.Left, e.Lost)):
            took("doubled")
            yield _deliver(replace(world, mail=(*rest, message), doubles=world.doubles - 1), message)
        if world.damages and isinstance(message, e.Warm) and message.holds is not None and message.holds >= 0:
            took("damaged")
            damaged = world
            if message.worker in procs:
                damaged = _with(world, message.worker, replace(procs[message.worker], holds=None))
            yield _deliver(replace(damaged, mail=rest, damages=world.damages - 1), e.Unreadable(message.worker, -1))
        if world.losses and isinstance(message, (e.Joined, e.Committed, e.Saved)):
            took("lost message")
            yield replace(world, mail=rest, losses=world.losses - 1)
    if len(procs) < world.capacity and world.starting:
        name, *others = world.starting
        came = (*world.procs, (name, Proc(holds=-1)))
        up = replace(world, procs=came, starting=tuple(others), mail=(*world.mail, e.Warm(name, -1)))
        yield _deliver(up, e.Up(name))
    if world.arrivals:
        took("arrival")
        yield replace(world, arrivals=world.arrivals - 1, capacity=world.capacity + 1)
    applied = dict(world.members)
    generation = world.group.generation
    for name, proc in world.procs:
        if world.deaths:
            took("death")
            gone = tuple((other, entry) for other, entry in world.procs if other != name)
            yield replace(world, procs=gone, mail=(*world.mail, e.Lost(name)), deaths=world.deaths - 1)
        if world.drains and name in world.group.workers:
            took("drain")
            yield replace(world, drains=world.drains - 1, mail=(*world.mail, e.Notice(name)))
        if proc.inside != generation or proc.inside < 0:
            continue
        formed = all(member not in procs or procs[member].inside == generation for member in applied)
        peers_gone = any(member not in procs for member in applied)
        if proc.interrupted or peers_gone:
            took("interrupted")
            holds = None if proc.copying else proc.holds
            yield _leave(world, name, e.Left(name, generation, holds, "interrupted"))
            if proc.interrupted:
                continue
        if proc.copying:
            if world.donor not in procs and not peers_gone:
                took("interrupted")
                yield _leave(world, name, e.Left(name, generation, None, "interrupted"))
            if formed and not peers_gone and world.donor in procs:
                took("copied")
                donor_holds = procs[world.donor].holds
                done = replace(proc, copying=False, holds=donor_holds)
                yield _with(
                    replace(
                        world,
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
            yield _leave(world, name, e.Left(name, generation, step, "finished"))
            continue
        # Who left by a fault is at no boundary with the others.
        level = all(
            other == step and procs[member].inside == generation for member, other in applied.items() if member in procs
        )
        if world.paused == generation and level and not peers_gone:
            took("paused")
            after = world
            for member in applied:
                after = _leave(after, member, e.Left(member, generation, step, "paused"))
            yield after
        if world.faults and not peers_gone:
            took("fault")
            yield _leave(
                replace(world, faults=world.faults - 1), name, e.Left(name, generation, None, "failed", "oops")
            )
        if all(other is not None and other >= step for other in applied.values()):
            took("applied")
            yield _apply(world, name, proc, step + 1)
    phase = world.group.phase
    if world.lates and phase in (Phase.JOIN, Phase.TRAIN, Phase.PAUSE, Phase.LEAVE):
        took("late")
        yield _deliver(replace(world, lates=world.lates - 1), e.Late(generation))
    if world.saves and world.announced > world.group.durable and phase is not Phase.END:
        took("saved")
        yield _deliver(replace(world, saves=world.saves - 1), e.Saved(world.announced))
    if world.stops:
        took("stop")
        yield _deliver(replace(world, stops=world.stops - 1), e.Stop())
    idle = not world.mail and not (len(procs) < world.capacity and world.starting)
    if idle and phase in (Phase.GATHER, Phase.JOIN, Phase.CLOSE):
        yield _deliver(world, e.Late(generation))


def _apply(world: World, name: str, proc: Proc, step: int) -> World:
    members = tuple((m, step if m == name else s) for m, s in world.members)
    after = _with(replace(world, members=members), name, replace(proc, holds=step))
    steps = [s for _, s in members if s is not None]
    proven = max(min(steps), max(steps) - 1)
    if proven > world.announced and len(steps) == len(members):
        # What proves it was reported before anything else that these workers will say.
        message = e.Committed(world.group.generation, proven)
        after = _deliver(replace(after, announced=proven), message)
    return after


def _with(world: World, name: str, proc: Proc) -> World:
    return replace(world, procs=tuple((other, proc if other == name else entry) for other, entry in world.procs))


def _leave(world: World, name: str, message: e.Left) -> World:
    proc = replace(dict(world.procs)[name], inside=-1, holds=message.holds, copying=False, interrupted=False)
    return _with(replace(world, mail=(*world.mail, message)), name, proc)


def _deliver(world: World, event: e.Event) -> World:
    before = world.group
    group, commands = machine.step(before, event)
    known = getattr(event, "worker", None) is None or event.worker in before.workers  # type: ignore[union-attr]
    current = getattr(event, "generation", before.generation) == before.generation
    if known and current and group.phase not in machine.TABLE[before.phase, type(event)].leads:
        raise Violation(f"{type(event).__name__} led from {before.phase.name} to {group.phase.name}")
    if (not known or not current) and (group is not before or commands):
        raise Violation(f"a stale {event} had an effect")
    if group.committed < before.committed:
        if group.committed < group.durable:
            raise Violation(f"back to {group.committed}, though there is a checkpoint of {group.durable}")
        # Whoever does not say in time that it left is dismissed, whatever it holds.
        for name, proc in () if isinstance(event, e.Late) else world.procs:
            if _holding((name, proc)) >= before.committed:
                raise Violation(f"committed steps were forgotten, though {name} holds {proc.holds}")
        world = replace(world, announced=group.committed)
    if group.generation not in (before.generation, before.generation + 1):
        raise Violation(f"the generation went from {before.generation} to {group.generation}")
    ended = [command.status for command in commands if isinstance(command, e.End)]
    if (
        ended
        and not isinstance(event, e.Handed | e.Late)
        and 0 <= world.announced <= max(map(_holding, world.procs), default=-2)
    ):
        raise Violation(f"given up ({group.failure}), though a worker holds the state")
    idle = [worker for worker in before.workers.values() if worker.state == "idle" and not worker.leaving]
    if ended == ["failed"] and before.phase is Phase.GATHER and len(idle) >= before.limits.minimum:
        raise Violation(f"given up ({group.failure}), though there are workers enough")
    if ended == ["finished"] and not isinstance(event, e.Handed):
        raise Violation("finished, and nobody has handed the model over")
    return _obey(replace(world, group=group), commands)


def _obey(world: World, commands: list[e.Command]) -> World:
    for command in commands:
        procs = dict(world.procs)
        if isinstance(command, e.Start):
            world = replace(world, starting=(*world.starting, *command.workers))
        elif isinstance(command, e.Join):
            world = _join(world, command)
        elif isinstance(command, e.Interrupt):
            for name in command.workers:
                if name in procs and procs[name].inside == command.generation:
                    world = _with(world, name, replace(procs[name], interrupted=True))
        elif isinstance(command, e.Pause):
            world = replace(world, paused=command.generation)
        elif isinstance(command, e.Dismiss):
            left = tuple((name, proc) for name, proc in world.procs if name != command.worker)
            starting = tuple(name for name in world.starting if name != command.worker)
            world = replace(world, procs=left, starting=starting)
        elif isinstance(command, e.Rehearse):
            if command.worker in procs:
                world = _with(world, command.worker, replace(procs[command.worker], holds=None))
                world = replace(world, mail=(*world.mail, e.Warm(command.worker, None)))
        elif isinstance(command, e.Restore):
            if command.step != world.group.durable:
                raise Violation(f"{command.worker} reads step {command.step}, not {world.group.durable}")
            if command.worker in procs:
                world = _with(world, command.worker, replace(procs[command.worker], holds=command.step))
                world = replace(world, mail=(*world.mail, e.Warm(command.worker, command.step)))
        elif isinstance(command, e.Keep):
            for name, worker in world.group.workers.items():
                if worker.state == "idle" and worker.holds == command.step and not worker.leaving:
                    raise Violation(f"a checkpoint of step {command.step}, which {name} holds and stays")
            world = replace(world, mail=(*world.mail, e.Saved(command.step)))
        elif isinstance(command, e.HandOver) and command.worker in procs:
            held = procs[command.worker].holds
            if held is None or held < world.announced:
                raise Violation(f"{command.worker} hands over step {held}, though {world.announced} is committed")
            world = replace(world, mail=(*world.mail, e.Handed()))
    return world


def _holding(named: tuple[str, Proc]) -> int:
    proc = named[1]
    return -2 if proc.inside >= 0 or proc.holds is None else proc.holds


def _join(world: World, command: e.Join) -> World:
    procs = dict(world.procs)
    limits, view = world.group.limits, command.view
    names = [member.worker for member in view.members]
    if sorted(shard for member in view.members for shard in member.shards) != list(range(limits.shards)):
        raise Violation("not every shard has one host")
    if len(set(names)) != len(names) or not limits.minimum <= len(names) <= limits.maximum:
        raise Violation(f"a view of {names}")
    if command.first_step <= world.announced:
        raise Violation(f"step {command.first_step} would be done again, and {world.announced} is committed")
    for name, proc in procs.items():
        if proc.inside >= 0:
            raise Violation(f"{name} is inside {proc.inside} while {view.generation} forms")
    donor = procs.get(command.donor)
    if donor is not None and donor.holds != command.first_step - 1:
        raise Violation(f"the donor {command.donor} holds {donor.holds}, not {command.first_step - 1}")
    for name in names:
        if name not in procs:
            continue
        copying = name in command.copies
        if not copying and procs[name].holds != command.first_step - 1:
            raise Violation(f"{name} would start step {command.first_step} from {procs[name].holds}")
        world = _with(world, name, replace(procs[name], inside=view.generation, copying=copying, interrupted=False))
        if not copying:
            world = replace(world, mail=(*world.mail, e.Joined(name, view.generation)))
    members = tuple((name, None if name in command.copies else command.first_step - 1) for name in names)
    return replace(world, members=members, donor=command.donor)
