"""What is known of the group: its phase, its generation, its workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from raytrain_plus.membership.mesh import Shape, Stage, useful_shape


class Phase(Enum):
    """What the group is doing."""

    GATHER = "waiting for enough workers"
    JOIN = "forming a world, copying state"
    TRAIN = "training"
    PAUSE = "asked to stop at one boundary"
    LEAVE = "leaving a broken world"
    CLOSE = "handing the model over"
    END = "over"


@dataclass(frozen=True, slots=True)
class Limits:
    """What of the job the machine goes by."""

    minimum: int
    maximum: int
    spares: int
    shards: int
    steps: int
    max_failures: int | None
    expected: int
    """Workers, spares among them, that the cluster seemed to have room for: the first world waits for so many."""
    cuts: tuple[int, ...] = (1,)
    """The numbers of stages that the model can be cut into, the wished one first."""

    @property
    def useful(self) -> int:
        """The largest number of members that is ever formed."""
        shape = useful_shape(self.maximum, self.minimum, self.maximum, self.shards, self.cuts)
        return self.minimum if shape is None else max(self.minimum, shape.size)


@dataclass(frozen=True, slots=True)
class Worker:
    """What is known of one living worker."""

    state: Literal["coming", "up", "rehearsing", "restoring", "idle", "in"]
    """Asked for; process there; making a step for practice; reading a checkpoint; able to take any place; inside the
    generation."""
    holds: int | None = None
    """The step whose state it has: -1 the initial one; None a dirty one, half a copy, or none that counts."""
    stage: Stage | None = None
    """Of which stage; None where it is the initial state, of any, or none."""
    ready: int | None = None
    """The step after it, where it could apply that, too."""
    copies: frozenset[tuple[int, Stage]] = frozenset()
    """Steps and stages of which it keeps copies in memory, beside what it holds."""
    leaving: bool = False
    unwanted: bool = False
    """It leaves because fewer are wished, and stays where too few are left."""
    joined: bool = False
    proved: bool = False
    """It was in a world that was formed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Everything that decides what happens next."""

    limits: Limits
    phase: Phase = Phase.GATHER
    generation: int = -1
    shape: Shape = field(default_factory=lambda: Shape(1))
    seats: tuple[str, ...] = ()
    """The present view's members, by seat in its shape."""
    workers: Mapping[str, Worker] = field(default_factory=dict)
    named: int = 0
    """Workers ever asked for: names are never used again."""
    committed: int = -1
    durable: int = -1
    """The step of the newest complete checkpoint; the state after -1, the initial one, can always be had again."""
    again: int = -1
    """Up to this step all were committed in this very history, though the group has gone back and makes some again."""
    recalled: bool = False
    """Whether the members of the present generation were asked to take copies in."""
    kept: int = -1
    """The newest step whose state was to be kept because all who hold it will go."""
    leads: tuple[str, ...] = ()
    """Who hands the model over, by stage."""
    stopping: bool = False
    finished: bool = False
    """A member came back from the last step and what follows it."""
    failure: str = ""
    """Why the run has failed; empty while it has not."""
    faults: tuple[tuple[int, str, int], ...] = ()
    """(step, fault, generation) of the task's errors so far."""
    failures: int = 0
    fruitless: int = 0
    """Failures since the last one that had a step committed before it."""
    fruitless_at: int = -2
    """The committed step at the last failure."""
    cause: str = ""
    """Of the last failure, in words."""
    unformed: int = 0
    """Worlds in a row that did not form."""
    stillborn: int = 0
    """Workers lost before they were warm, since the last one that became so."""


def members_in(group: Group) -> tuple[str, ...]:
    """Members that have not come back from the present generation."""
    return tuple(name for name, worker in group.workers.items() if worker.state == "in")


def free(group: Group) -> list[str]:
    """Workers that can sit in the next view; those inside now will, once they are out. Better ones first."""
    able = [name for name, worker in group.workers.items() if worker.state in ("idle", "in") and not worker.leaving]
    return sorted(able, key=lambda name: (name not in group.seats, -holds(group, name)))


def holders(group: Group) -> list[list[str]]:
    """For each stage, the workers that may have its state after the last committed step; of those inside, nothing newer
    is known."""
    found: list[list[str]] = [[] for _ in range(group.shape.stages)]
    for name, worker in group.workers.items():
        if worker.state == "in" and name in group.seats:
            found[group.shape.stage(group.seats.index(name)).number].append(name)
        elif worker.state == "idle" and holds(group, name) >= max(group.committed, 0):
            stage = worker.stage
            if stage is not None and stage.of == group.shape.stages:
                found[stage.number].append(name)
    return found


@dataclass(frozen=True, slots=True)
class Standing:
    """A state that workers hold, all stages of it."""

    step: int
    donors: tuple[str, ...]
    """For each stage, one who has it; none where it is the initial state, which anybody makes anew."""
    copied: bool = False
    """Whether of some stage there is nothing but a copy."""


def standing(group: Group) -> Standing | None:
    """The newest state of which clean workers have every stage; the initial one where there is none, but workers.

    Of those who have a stage alike, one that holds it comes before one that keeps a copy, then one that stays and sits
    first.
    """
    idle = {name: worker for name, worker in group.workers.items() if worker.state == "idle"}
    order = {name: place for place, name in enumerate(group.seats)}
    ranked = sorted(idle, key=lambda name: (idle[name].leaving, order.get(name, len(order)), name))
    found: dict[tuple[int, int], dict[int, str]] = {}
    for name in ranked:
        held, stage = idle[name].holds, idle[name].stage
        if held is not None and held >= 0 and stage is not None:
            found.setdefault((held, stage.of), {}).setdefault(stage.number, name)
    held_ones = {key: frozenset(donors) for key, donors in found.items()}
    for name in ranked:
        for step, stage in idle[name].copies:
            found.setdefault((step, stage.of), {}).setdefault(stage.number, name)
    whole = [(held, of) for (held, of), donors in found.items() if len(donors) == of]
    if whole:
        # The same state in two cuts is there only where a checkpoint has been read.
        held, of = max(whole, key=lambda one: (one[0], one[1] == group.shape.stages))
        copied = len(held_ones.get((held, of), ())) < of
        return Standing(held, tuple(found[held, of][number] for number in range(of)), copied)
    return Standing(-1, ()) if idle else None


def unfinished(group: Group) -> tuple[str, ...]:
    """Workers that have all sums of a step which others have applied: they can, too, and then hold what those hold."""
    newest = max((holds(group, name) for name, worker in group.workers.items() if worker.state == "idle"), default=-2)
    return tuple(
        name for name, worker in group.workers.items() if worker.state == "idle" and worker.ready == newest >= 0
    )


def recallable(group: Group, best: Standing) -> tuple[str, ...]:
    """Workers that have a copy of their own stage of that state, and not the state itself: where all stages can be held
    by these and those who hold one; else nobody."""
    idle = {name: worker for name, worker in group.workers.items() if worker.state == "idle" and worker.stage}
    held = {worker.stage for worker in idle.values() if worker.holds == best.step}
    able = {
        name: worker.stage
        for name, worker in idle.items()
        if worker.holds != best.step and (best.step, worker.stage) in worker.copies
    }
    wanted = {Stage(number, len(best.donors)) for number in range(len(best.donors))}
    return tuple(able) if wanted <= held | set(able.values()) else ()


def holds(group: Group, name: str) -> int:
    step = group.workers[name].holds
    return -2 if step is None else step


def with_worker(group: Group, name: str, **changes: Any) -> Group:
    return replace(group, workers={**group.workers, name: replace(group.workers[name], **changes)})


def without(group: Group, name: str) -> Group:
    return replace(group, workers={other: worker for other, worker in group.workers.items() if other != name})


def shape_for(group: Group, count: int) -> Shape | None:
    """What `count` workers are to form; None where they are too few.

    Spares are held back from growth, not from taking a lost worker's place.
    """
    limits = group.limits
    keep = min(count, max(limits.minimum, len(group.seats)))
    most = max(count - limits.spares, keep)
    return useful_shape(most, limits.minimum, limits.maximum, limits.shards, limits.cuts)


def suspects(group: Group) -> list[str]:
    """Members because of whom, it seems, no world forms for the second time: those that were never in one.

    Nobody, while too few others would be left.
    """
    if group.phase is not Phase.JOIN or group.unformed < 1:
        return []
    proved = [name for name in free(group) if group.workers[name].proved]
    if len(proved) < group.limits.minimum:
        return []
    return [name for name in group.seats if name in group.workers and not group.workers[name].proved]


def preparing(group: Group) -> bool:
    return any(worker.state == "up" and not worker.leaving for worker in group.workers.values())


def wants_change(group: Group) -> bool:
    """Whether another view than the present one should be formed, though nothing is broken."""
    shape = shape_for(group, len(free(group)))
    if shape is None:
        return False
    if any(group.workers[name].leaving for name in members_in(group)):
        return True
    # Workers that come up together join together: one change, not one each.
    return shape.size > len(group.seats) and not preparing(group)
