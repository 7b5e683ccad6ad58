"""Explore the switch of a group's members to NCCL in every order of events, with the machine and kills at any moment.

`switching` has the members. Here are the messages between them and the machine, and what may happen next. A move is
`sure` if it happens sooner or later: then every run must end by sure moves alone, whatever else has happened.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from raytrain_plus.membership import events as e
from raytrain_plus.membership import state_machine
from raytrain_plus.membership.group_state import Group, Limits, Phase
from raytrain_plus.membership.mesh import Stage
from tests.unit.membership import switching
from tests.unit.membership.explorer import Violation
from tests.unit.membership.switching import Seat, after, check_alike, moment, total

_State = TypeVar("_State", bound=Hashable)
Moves = Iterator[tuple[_State, bool]]
"""The moves that may follow, each with whether it is sure to come."""
IN, LEFT, DEAD = "in", "left", "dead"


class Sum(NamedTuple):
    """The newest sum that has ended: each member takes its result when it does."""

    what: str = ""
    result: bytes = b""
    unready: bool = False
    """Whether NCCL had not formed on some member, as they know it when they submit a header."""


class World(NamedTuple):
    """A group of workers, its machine, and what may still happen."""

    group: int
    """The number of the group as the machine knows it: see `Switch.group`."""
    out: tuple[tuple[str, int | None], ...] = ()
    """The workers in no generation, and the steps whose states they hold."""
    members: tuple[tuple[str, int, str], ...] = ()
    """Those of the last generation, by rank, each with its moment, and whether it is still there."""
    donors: tuple[str, ...] = ()
    """The workers that provide the state that members lack."""
    told: tuple[str, ...] = ()
    """The members that were told to leave."""
    summed: Sum = Sum()
    lost: tuple[str, ...] = ()
    """The dead workers that the machine does not know of yet.

    Everything else reaches it at once. A report that comes late would change nothing for the sums: the machine acts on
    it just as if the member had joined, or left, that much later.
    """
    starting: tuple[str, ...] = ()
    announced: int = -1
    kills: int = 0
    fails: int = 0
    """How often NCCL fails to form on a member, though nobody is gone."""
    arrivals: int = 0
    """How many workers may still start."""


def explore(first: _State, moves: Callable[[_State], Moves[_State]], ended: Callable[[_State], bool]) -> int:
    """Visit every state; return their number. Raises `Violation` if a run need not end."""
    # Nothing here refers to itself, and a search for what does would take a quarter of the time.
    gc.disable()
    try:
        following = _following(first, moves, ended)
    finally:
        gc.enable()
    _check_no_way_back(following)
    return len(following)


def _following(
    first: _State, moves: Callable[[_State], Moves[_State]], ended: Callable[[_State], bool]
) -> list[list[int]]:
    """Visit every state; return the states that can follow each one."""
    numbers, todo = {first: 0}, [first]
    following: list[list[int]] = [[]]
    while todo:
        here = todo.pop()
        number, sure_moves = numbers[here], 0
        for there, sure in moves(here):
            sure_moves += sure
            to = numbers.get(there)
            if to is None:
                to = numbers[there] = len(following)
                following.append([])
                todo.append(there)
            following[number].append(to)
        if not sure_moves and not ended(here):
            raise Violation(f"nothing need happen any more in {shown(here)}")
    return following


def _check_no_way_back(following: list[list[int]]) -> None:
    """Raise `Violation` if a state can be reached from itself: else each run ends, as no state is without a move."""
    leading = [0] * len(following)
    for ways in following:
        for to in ways:
            leading[to] += 1
    free = [number for number, count in enumerate(leading) if not count]
    done = 0
    while free:
        done += 1
        for to in following[free.pop()]:
            leading[to] -= 1
            if not leading[to]:
                free.append(to)
    if done < len(following):
        raise Violation(f"{len(following) - done} states can go on for ever")


def shown(state: Any) -> str:
    """Return the state in words, with its members' moments."""
    return f"{state} with {[moment(number) for _, number, _ in state.members]}"


class Switch:
    """The moves of `World`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._groups: list[Group] = []
        self._numbers: dict[Any, int] = {}
        self._stepped: dict[tuple[int, e.Event], tuple[int, list[e.Command]]] = {}
        self.switched: set[int] = set()
        """The generations in which members have switched."""
        self.killed: set[int] = set()
        """How many members had summed by NCCL when one of them was killed."""

    def begin(self, *, kills: int, fails: int = 0, arrivals: int = 0) -> World:
        """Return the world in which the first generation forms."""
        group, [started] = state_machine.begin(self._limits)
        assert isinstance(started, e.Start)
        world = World(self._number(group), kills=kills, fails=fails, arrivals=arrivals, starting=started.workers)
        for name in started.workers:
            world = self._arrived(world, name)
        return world

    def group(self, world: World) -> Group:
        """Return the group as the machine knows it."""
        return self._groups[world.group]

    def ended(self, world: World) -> bool:
        """Return whether the run has ended. Raises `Violation` if it has failed."""
        group = self.group(world)
        if group.failure:
            raise Violation(f"{group.failure}: {shown(world)}")
        return group.phase is Phase.END

    def moves(self, world: World) -> Moves[World]:
        """Yield what may follow."""
        if self.ended(world):
            return
        for name in world.lost:
            unknown = tuple(one for one in world.lost if one != name)
            yield self._told(world._replace(lost=unknown), e.Lost(name)), True
        if world.starting and world.arrivals:
            yield self._arrived(world._replace(arrivals=world.arrivals - 1), world.starting[0]), True
        broken = any(there == DEAD for _, _, there in world.members)
        for rank, (name, number, there) in enumerate(world.members):
            if there == IN:
                yield from self._of_member(world, rank, name, number, broken)
        if world.kills:
            for name, _ in world.out:
                out = tuple(one for one in world.out if one[0] != name)
                yield world._replace(kills=world.kills - 1, out=out, lost=tuple(sorted([*world.lost, name]))), False

    def _of_member(self, world: World, rank: int, name: str, number: int, broken: bool) -> Moves[World]:
        """Yield what a member may do, or have done to it; `broken`: another one is dead."""
        here = moment(number)
        if world.kills:
            self.killed.add(sum("n" in moment(other).ways for _, other, _ in world.members))
            dead = self._put(world, rank, number, DEAD)
            yield dead._replace(kills=world.kills - 1, lost=tuple(sorted([*world.lost, name]))), False
        if here.nccl == "forming" and here.waits != "over" and name not in world.told:
            # NCCL forms only once all members have begun to form it. A member that was told to leave does not use it.
            if all(moment(other).nccl for _, other, _ in world.members):
                yield self._moved(world, rank, after(number, "ready")), False
            if world.fails:
                yield self._moved(world._replace(fails=world.fails - 1), rank, after(number, "failed")), False
        alive = {*dict(world.out), *(other for other, _, there in world.members if there == IN)}
        given = here.waits == "state" and alive.issuperset(world.donors)
        # Without being told, a member notices the death of a donor for sure, but another's perhaps: NCCL waits.
        sure = name in world.told or (here.waits == "state" and not given)
        if sure or broken:
            yield self._out(world, rank, "interrupted"), sure
        if here.waits == "over":
            yield self._out(world, rank, here.what), True
        elif here.waits == "begin":
            yield self._moved(world, rank, after(number, "begin")), True
        elif given:
            yield self._moved(world, rank, after(number, "state")), True
        elif here.waits == "sum" and world.summed.what == f"{here.way} {here.what}":
            there = self._moved(world, rank, after(number, world.summed.result))
            wait = {f"{one.way} {one.what}" for one in (moment(n) for _, n, where in there.members if where == IN)}
            yield there if there.summed.what in wait else there._replace(summed=Sum()), True

    def _moved(self, world: World, rank: int, number: int) -> World:
        """Put a member at its next moment; check it, and tell the machine of its joining and its steps."""
        name, before, _ = world.members[rank]
        world = self._put(world, rank, number, IN)
        check_alike(number, (other for name_of, other, _ in world.members if name_of != name))
        was, here = moment(before), moment(number)
        if "n" in here.ways and "n" not in was.ways:
            self.switched.add(self.group(world).generation)
        if len(here.heard) > len(was.heard) and here.seat.size > 1 and (here.heard[-1] == "f") != world.summed.unready:
            raise Violation(f"the header says something else than its members: {shown(world)}")
        ended = total(tuple(other for _, other, _ in world.members)) if here.waits == "sum" else None
        if ended is not None:
            unready = any(moment(other).unready for _, other, _ in world.members)
            world = world._replace(summed=Sum(f"{here.way} {here.what}", ended, unready))
        if here.waits == "begin" and was.waits in ("sum", "state") and not here.heard and not was.heard:
            world = self._told(world, e.Joined(name, self.group(world).generation))
        if here.applied > was.applied:
            steps = [moment(other).applied for _, other, _ in world.members]
            proven = max(min(steps), max(steps) - 1)
            if proven > world.announced:
                event = e.Committed(self.group(world).generation, proven)
                world = self._told(world._replace(announced=proven), event)
        return world

    def _put(self, world: World, rank: int, number: int, there: str) -> World:
        entry = world.members[rank][0], number, there
        return world._replace(members=(*world.members[:rank], entry, *world.members[rank + 1 :]))

    def _out(self, world: World, rank: int, why: Any) -> World:
        """A member leaves its world, and says what it holds."""
        name, number, _ = world.members[rank]
        switching.leave(number)
        here = moment(number)
        # The first sum is that of the id of NCCL's members, and the state comes after it.
        without = here.waits == "state" or (here.waits == "sum" and len(here.ways) == 1)
        holds = None if here.seat.lacks and without else here.applied
        left = e.Left(name, self.group(world).generation, holds, why, stage=None if holds is None else Stage())
        world = self._put(world, rank, number, LEFT)
        told = tuple(one for one in world.told if one != name)
        return self._told(world._replace(told=told, out=tuple(sorted([*world.out, (name, holds)]))), left)

    def _arrived(self, world: World, name: str) -> World:
        starting = tuple(one for one in world.starting if one != name)
        world = world._replace(starting=starting, out=tuple(sorted([*world.out, (name, -1)])))
        return self._told(self._told(world, e.Up(name)), e.Ready(name, -1))

    def _told(self, world: World, event: e.Event) -> World:
        """Deliver an event to the machine, and obey it."""
        found = self._stepped.get((world.group, event))
        if found is None:
            group, commands = state_machine.step(self._groups[world.group], event)
            found = self._stepped[world.group, event] = self._number(group), commands
        group_number, commands = found
        world = world._replace(group=group_number)
        for command in commands:
            world = self._obeyed(world, command)
        return world

    def _number(self, group: Group) -> int:
        # Words, and how often worlds broke, decide nothing here: there is no limit.
        group = replace(group, cause="", failures=0)
        key = repr(replace(group, limits=None))  # type: ignore[arg-type]
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._groups)
            self._groups.append(group)
        return number

    def _obeyed(self, world: World, command: e.Command) -> World:
        if isinstance(command, e.Join):
            return self._join(world, command)
        if isinstance(command, e.Start):
            return world._replace(starting=(*world.starting, *command.workers))
        if isinstance(command, e.Interrupt):
            inside = {name for name, _, there in world.members if there == IN}
            return world._replace(told=tuple(sorted({*world.told, *inside.intersection(command.workers)})))
        if isinstance(command, e.Pause):
            for rank, (_, number, there) in enumerate(world.members):
                if there == IN and moment(number).waits != "over":
                    world = self._put(world, rank, after(number, "pause"), IN)
            return world
        if isinstance(command, e.WarmUp):
            if command.worker not in dict(world.out):
                return world
            out = tuple((name, None if name == command.worker else holds) for name, holds in world.out)
            return self._told(world._replace(out=out), e.Ready(command.worker, None))
        if isinstance(command, e.HandOver):
            return self._told(world, e.Handed())
        if isinstance(command, e.Dismiss):
            return world._replace(out=tuple(one for one in world.out if one[0] != command.worker))
        if isinstance(command, e.Formed | e.Wait | e.End):
            return world
        raise Violation(f"{command} in {shown(world)}")

    def _join(self, world: World, command: e.Join) -> World:
        """Begin a generation. The machine may not know yet that a member is dead: the others wait for it."""
        if any(there == IN for _, _, there in world.members):
            raise Violation(f"a generation begins, and another goes on: {shown(world)}")
        held, view = dict(world.out), command.view
        members = []
        for rank, member in enumerate(view.members):
            name = member.worker
            lacks = command.lacks.get(name) in ("newer", "stage")
            if name in held and not lacks and command.first_step and held[name] != command.first_step - 1:
                raise Violation(f"{name} holds {held[name]}, and begins with {command.first_step}")
            seat = Seat(view.generation % 2, rank, len(view.members), command.first_step, self._limits.steps, lacks)
            members.append((name, switching.begin(seat), IN if name in held else DEAD))
        out = tuple(one for one in world.out if one[0] not in {name for name, _, _ in members})
        announced = max(world.announced, command.first_step - 1)
        donors = tuple(name for name, _ in command.donors) if command.lacks else ()
        world = world._replace(out=out, members=tuple(members), donors=donors, told=(), summed=Sum())
        world = world._replace(announced=announced)
        if all(there == IN for _, _, there in members):
            ended = total(tuple(number for _, number, _ in members))
            first = moment(members[0][1])
            if ended is not None:
                world = world._replace(summed=Sum(f"{first.way} {first.what}", ended))
        if len(members) == 1 and not moment(members[0][1]).seat.lacks:
            world = self._told(world, e.Joined(members[0][0], view.generation))
        return world


class Staged(NamedTuple):
    """One generation of two replicas of two stages, and what may still happen."""

    members: tuple[tuple[str, int, str], ...]
    """Those of the first stage, then those of the second: each with its moment, and whether it is still there."""
    summed: tuple[Sum, Sum] = (Sum(), Sum())
    """The newest sum of each stage's ring that has ended."""
    kills: int = 0


def begin_staged(steps: int, *, kills: int) -> Staged:
    """Return the members of two stages before they join."""
    places = [(stage, rank) for stage in (0, 1) for rank in (0, 1)]
    seats = [Seat(stage, rank, 2, 0, steps, stage=stage) for stage, rank in places]
    members = tuple((f"{seat.stage}/{seat.rank}", switching.begin(seat), IN) for seat in seats)
    return _summed_in(_summed_in(Staged(members, kills=kills), 0), 1)


def ended_staged(here: Staged) -> bool:
    """Return whether all can leave: all have returned, or one is dead."""
    return any(there == DEAD for _, _, there in here.members) or all(
        moment(number).waits == "over" for _, number, _ in here.members
    )


def moves_staged(here: Staged) -> Moves[Staged]:
    """Yield what may follow. Once one is dead, the others go on as far as they can, and leave at any moment.

    To leave is no move: it changes nothing for those who stay a moment longer.
    """
    broken = any(there == DEAD for _, _, there in here.members)
    for place, (_, number, there) in enumerate(here.members):
        if there != IN:
            continue
        at, stage = moment(number), place // 2
        if here.kills:
            yield _put_staged(here, place, number, DEAD)._replace(kills=here.kills - 1), False
        if broken or at.waits == "over":
            switching.leave(number)
        begun = all(moment(other).nccl for _, other, _ in _ring(here, stage))
        # NCCL that fails, and NCCL that does not form in time, are alike to the others.
        if at.nccl == "forming" and begun and at.waits != "over" and not broken:
            yield _moved_staged(here, place, "ready"), False
        if at.waits == "begin":
            yield _moved_staged(here, place, "begin"), True
        elif at.waits == "note":
            # From the other stage of the same replica.
            sent = dict(moment(here.members[(place + 2) % 4][1]).sent)
            if at.what in sent:
                yield _moved_staged(here, place, sent[at.what]), True
        elif at.waits == "sum" and here.summed[stage].what == f"{at.way} {at.what}":
            yield _moved_staged(here, place, here.summed[stage].result), True


def _ring(here: Staged, stage: int) -> tuple[tuple[str, int, str], ...]:
    return here.members[2 * stage : 2 * stage + 2]


def _put_staged(here: Staged, place: int, number: int, there: str) -> Staged:
    entry = here.members[place][0], number, there
    return here._replace(members=(*here.members[:place], entry, *here.members[place + 1 :]))


def _moved_staged(here: Staged, place: int, entry: Any) -> Staged:
    number = after(here.members[place][1], entry)
    here = _put_staged(here, place, number, IN)
    check_alike(number, (here.members[place ^ 1][1],))
    return _summed_in(here, place // 2)


def _summed_in(here: Staged, stage: int) -> Staged:
    """End the sum of a stage's ring once all have submitted it."""
    ring = _ring(here, stage)
    result, first = total(tuple(number for _, number, _ in ring)), moment(ring[0][1])
    if result is None:
        return here
    found = Sum(f"{first.way} {first.what}", result)
    return here._replace(summed=(found, here.summed[1]) if stage == 0 else (here.summed[0], found))
