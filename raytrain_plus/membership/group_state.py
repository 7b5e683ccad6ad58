"""Define what is known of the group: its phase, its generation, its workers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from raytrain_plus.membership.mesh import Donor, Shape, Stage, stages_of
from raytrain_plus.membership.owners import Owners, shortage
from raytrain_plus.membership.pieces import Piece, Pieces, union
from raytrain_plus.membership.sizes import SizeTable


class Phase(Enum):
    """What the group is doing. The values complete "... took too long"."""

    GATHER = "waiting for enough workers"
    JOIN = "forming a world and copying state"
    TRAIN = "training"
    PAUSE = "stopping at a step boundary"
    LEAVE = "leaving a broken world"
    CLOSE = "exporting the model"
    END = "over"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the job that the state machine obeys."""

    sizes: SizeTable
    """Which group to form out of how many workers."""
    spares: int
    steps: int
    max_failures: int | None
    expected: int
    """The number of workers, including spares, that the cluster seemed to have room for: the first world waits for
    them."""
    parts: Mapping[Stage, Pieces] = field(default_factory=dict)
    """The pieces of each stage of the possible partitions, and of the whole; empty if the layers are not measured.

    The `rows` of a stage are among them.
    """
    rows: Pieces = field(default_factory=Pieces)
    """The rows of the weights, if each worker holds the optimizer's state of some only; else empty."""
    row_bytes: Mapping[str, int] = field(default_factory=dict)
    holders: int = 1
    """How many workers hold the optimizer's state of each row."""
    by_layer: bool = False
    """Whether the rows of each layer are shared equally."""

    def pieces(self, stage: Stage) -> Pieces:
        """Return what a stage consists of: an equal part of the whole if the layers are not measured."""
        if found := self.parts.get(stage):
            return found
        most = math.lcm(*(stages * ranks for stages, ranks in self.sizes.layouts))
        rows = most // (stage.of * stage.ranks)
        return union([Pieces.of([Piece("", stage.index * rows, (stage.index + 1) * rows)]), self.rows])

    def rows_of(self, stage: Stage) -> Pieces:
        """Return the rows of the weights of a stage, if each worker holds the optimizer's state of some only."""
        return self.pieces(stage) & self.rows if self.rows else self.rows

    def held(self, stage: Stage, owned: Pieces | None) -> Pieces:
        """Return what a worker has of a stage, given the rows whose optimizer's state it holds; None for all."""
        return self.pieces(stage) if owned is None else self.pieces(stage) - (self.rows - owned)

    def owned_rows(self, stage: Stage, owned: Pieces | None) -> Pieces:
        """Return the rows of a stage whose optimizer's state a worker holds, given what is known of them; None: all."""
        return self.rows_of(stage) if owned is None else owned


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What is known of one living worker."""

    state: Literal["coming", "up", "warming_up", "restoring", "idle", "in"]
    """Requested; process started; running a warm-up step; reading a checkpoint; able to take any place; inside the
    generation."""
    holds: int | None = None
    """The step whose state it has: -1 for the initial one; None if partially applied, half copied, or without
    meaning."""
    stage: Stage | None = None
    """The stage of that state (`Limits.pieces` has its pieces); None for the initial state, which fits any stage, or
    without a state."""
    ready: int | None = None
    """The step after `holds`, if it could apply that step too."""
    owned: Pieces | None = None
    """The rows of `Limits.rows` whose optimizer's state belongs to that; None for all."""
    complete: bool = True
    """Whether it has the weights of all other rows too."""
    copies: frozenset[tuple[int, Stage]] = frozenset()
    """Steps and stages that it keeps copies of in memory, in addition to what it holds."""
    node: str = ""
    leaving: bool = False
    unwanted: bool = False
    """It leaves because fewer workers are requested; it stays if too few would be left."""
    joined: bool = False
    proved: bool = False
    """It was in a world that formed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Everything that determines what happens next."""

    limits: Limits
    phase: Phase = Phase.GATHER
    generation: int = -1
    shape: Shape = field(default_factory=lambda: Shape(1))
    seats: tuple[str, ...] = ()
    """The current view's members, by seat in its shape."""
    workers: Mapping[str, WorkerStatus] = field(default_factory=dict)
    named: int = 0
    """The number of workers ever requested: names are never reused."""
    owners: Owners = field(default_factory=dict)
    """The rows whose optimizer's state each member holds, if that is sharded."""
    broken: bool = False
    """The last world ended by a failure, and no other has formed since: nothing moves that need not."""
    committed: int = -1
    durable: int = -1
    """The step of the newest complete checkpoint; -1 stands for the initial state, which can always be rebuilt."""
    again: int = -1
    """All steps up to this one were committed in this same history, though the group has gone back and recomputes
    some."""
    recalled: bool = False
    """Whether the members of the current generation were asked to load copies."""
    kept: int = -1
    """The newest step for which a checkpoint was requested because all its holders will leave."""
    leads: tuple[Donor, ...] = ()
    """The workers that provide the model for export."""
    stopping: bool = False
    finished: bool = False
    """A member came back from the last step and what follows it."""
    ended_at: int = -1
    """That step: the last one of the job, or an earlier one if the run no longer improves."""
    failure: str = ""
    """Why the run has failed; empty if it has not."""
    faults: tuple[tuple[int, str, int], ...] = ()
    """(step, fault, generation) of the task's errors so far."""
    starved: tuple[tuple[int, int, int], ...] = ()
    """(members, generation, committed step) of the groups that lost a member because memory ran out."""
    failures: int = 0
    fruitless: int = 0
    """The number of failures since the last one that followed a newly committed step."""
    fruitless_at: int = -2
    """The committed step at the last failure."""
    cause: str = ""
    """The cause of the last failure, in words."""
    unformed: int = 0
    """The number of consecutive worlds that did not form."""
    stillborn: int = 0
    """The number of workers lost before they were ready, since the last one that became ready."""


def members_in(group: Group) -> tuple[str, ...]:
    """Return the members that have not come back from the current generation."""
    return tuple(name for name, worker in group.workers.items() if worker.state == "in")


def free(group: Group) -> list[str]:
    """Return the workers that can sit in the next view, better ones first.

    Members still inside the generation count: they can once they are out.
    """
    able = [name for name, worker in group.workers.items() if worker.state in ("idle", "in") and not worker.leaving]
    return sorted(able, key=lambda name: (name not in group.seats, -holds(group, name)))


def holders(group: Group) -> list[list[str]]:
    """Return, for each stage, the workers that may have its state after the last committed step.

    A worker inside the generation counts, since nothing newer is known of it.
    """
    found: list[list[str]] = [[] for _ in stages_of(*group.shape.layout)]
    for name, worker in group.workers.items():
        if worker.state == "in" and name in group.seats:
            found[group.shape.stage(group.seats.index(name)).index].append(name)
        elif worker.state == "idle" and holds(group, name) >= max(group.committed, 0):
            stage = worker.stage
            if stage is not None and stage.layout == group.shape.layout:
                found[stage.index].append(name)
    return found


@dataclass(frozen=True, slots=True)
class NewestState:
    """A complete state: workers hold all its pieces."""

    step: int
    donors: tuple[Donor, ...]
    """Workers that together have it, in the order of stages; empty for the initial state, which any worker can
    build."""
    copied: bool = False
    """Whether some of it exists only as a copy."""


def newest_state(group: Group) -> NewestState | None:
    """Return the newest state whose pieces workers hold; else the initial one; None without workers.

    A worker whose state is partially applied holds none. Of the workers that have the same stage, one that holds it
    comes before one that keeps a copy; then come those that stay, in the order of their seats.
    """
    idle = {name: worker for name, worker in group.workers.items() if worker.state == "idle"}
    order = {name: place for place, name in enumerate(group.seats)}
    ranked = sorted(idle, key=lambda name: (idle[name].leaving, order.get(name, len(order)), name))
    held = [(holds(group, name), offer) for name in ranked if (offer := _own_offer(group, name))]
    copies = [(step, _offer(group, name, stage)) for name in ranked for step, stage in idle[name].copies]
    for newest in sorted({step for step, _ in (*held, *copies) if step >= 0}, reverse=True):
        for offers in (held, [*held, *copies]):
            donors, missing = cover(group, [offer for step, offer in offers if step == newest])
            if not missing:
                return NewestState(newest, donors, offers is not held)
    return NewestState(-1, ()) if idle else None


Offer = tuple[str, Stage, Pieces]
"""A worker, a stage that it holds or keeps a copy of, and its pieces of that stage."""


def _own_offer(group: Group, name: str) -> Offer | None:
    """Return what a worker holds itself, if anything."""
    worker = group.workers[name]
    return None if worker.stage is None else (name, worker.stage, group.limits.held(worker.stage, worker.owned))


def _offer(group: Group, name: str, stage: Stage) -> Offer:
    """Return what a worker has in a copy: those are made of states that one worker holds whole."""
    return name, stage, group.limits.pieces(stage)


def cover(group: Group, offers: Iterable[Offer]) -> tuple[tuple[Donor, ...], Pieces]:
    """Return the offers needed to have as much of a state as all together, by stage, and what they all lack.

    Earlier offers come first, except that stages of the group's partition come before those of any other.
    """
    found, missing = [], group.limits.pieces(Stage())
    for name, stage, pieces in sorted(offers, key=lambda offer: offer[1].layout != group.shape.layout):
        if pieces & missing:
            found.append((name, stage))
            missing -= pieces
    return tuple(sorted(found, key=lambda donor: donor[1].index)), missing


def unfinished(group: Group) -> tuple[str, ...]:
    """Return the workers that have all sums of a step that others applied.

    They can apply it too and then hold the same state.
    """
    newest = max((holds(group, name) for name, worker in group.workers.items() if worker.state == "idle"), default=-2)
    return tuple(
        name for name, worker in group.workers.items() if worker.state == "idle" and worker.ready == newest >= 0
    )


def recallable(group: Group, best: NewestState) -> tuple[str, ...]:
    """Return the workers that have a copy of their own stage of that state but not the state itself.

    Return nobody unless these workers and those that hold parts of it have all of it together.
    """
    idle = {name: worker for name, worker in group.workers.items() if worker.state == "idle"}
    held = [offer for name, worker in idle.items() if worker.holds == best.step and (offer := _own_offer(group, name))]
    able = [
        _offer(group, name, stage)
        for name, worker in idle.items()
        if worker.holds != best.step and (stage := worker.stage) and (best.step, stage) in worker.copies
    ]
    return () if cover(group, [*held, *able])[1] else tuple(dict.fromkeys(name for name, _, _ in able))


def holds(group: Group, name: str) -> int:
    """Return the step whose state a worker holds: -1 for the initial one, -2 for none."""
    step = group.workers[name].holds
    return -2 if step is None else step


def with_worker(group: Group, name: str, **changes: Any) -> Group:
    """Return the group with these fields of one worker's status changed."""
    return replace(group, workers={**group.workers, name: replace(group.workers[name], **changes)})


def without(group: Group, name: str) -> Group:
    """Return the group without this worker."""
    return replace(group, workers={other: worker for other, worker in group.workers.items() if other != name})


def rescaled(group: Group, minimum: int, maximum: int, spares: int) -> Group:
    """Return the group with other limits of its numbers of workers; nobody leaves or comes for that yet."""
    sizes = replace(group.limits.sizes, minimum=minimum, maximum=maximum)
    return replace(group, limits=replace(group.limits, sizes=sizes, spares=spares))


def shape_for(group: Group, count: int) -> Shape | None:
    """Return the shape that `count` workers should form; None if they are too few.

    Spares are held back from growth, not from taking a lost worker's place.
    """
    limits = group.limits
    keep = min(count, max(limits.sizes.fewest, len(group.seats)))
    most = max(count - limits.spares, keep)
    return limits.sizes.shape(most)


def suspects(group: Group) -> list[str]:
    """Return the members suspected when no world forms for the second time: those that were never in one.

    Return nobody if too few others would be left.
    """
    if group.phase is not Phase.JOIN or group.unformed < 1:
        return []
    proved = [name for name in free(group) if group.workers[name].proved]
    if len(proved) < group.limits.sizes.fewest:
        return []
    return [name for name in group.seats if name in group.workers and not group.workers[name].proved]


def preparing(group: Group) -> bool:
    """Return whether a worker that stays is still preparing."""
    return any(worker.state == "up" and not worker.leaving for worker in group.workers.values())


def wants_change(group: Group) -> bool:
    """Return whether another view than the current one should be formed, though nothing is broken."""
    shape = shape_for(group, len(free(group)))
    if shape is None:
        return False
    if any(group.workers[name].leaving for name in members_in(group)):
        return True
    if len(group.seats) > group.limits.sizes.useful:
        # A rescale made some of the members spares.
        return True
    # Wait for workers that still prepare, so that all join in one change.
    return (shape.size > len(group.seats) or unprotected(group)) and not preparing(group)


def unprotected(group: Group) -> bool:
    """Return whether fewer members than wanted hold the optimizer's state of some row, as after a loss."""
    limits, seats = group.limits, group.seats
    return bool(limits.rows and seats) and any(
        shortage(
            limits.rows_of(group.shape.stage(ring[0])),
            {seats[seat]: group.owners[seats[seat]] for seat in ring},
            limits.holders,
        )
        for ring in group.shape.lines("replica")
    )
