"""Assign workers to seats of model replicas and stages, and derive who communicates with whom. Pure.

A seat is a number: first the seats of replica 0, by stage, then those of replica 1. A replica holds one whole copy of
the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from raytrain_plus.membership.sizes import useful_size


@dataclass(frozen=True, slots=True)
class Stage:
    """A position in a model replica: its number, counted from the model's front, out of `of` stages."""

    number: int = 0
    of: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """`replicas` model replicas, each of `stages` stages."""

    replicas: int
    stages: int = 1

    @property
    def size(self) -> int:
        """The number of seats."""
        return self.replicas * self.stages

    def seat(self, replica: int, stage: int) -> int:
        """Return the number of a seat."""
        return replica * self.stages + stage

    def place(self, seat: int) -> tuple[int, int]:
        """Return a seat's replica and stage.

        >>> Shape(2, 3).place(4)
        (1, 1)
        """
        return divmod(seat, self.stages)

    def stage(self, seat: int) -> Stage:
        """Return the stage that a seat holds.

        >>> Shape(2, 3).stage(4)
        Stage(number=1, of=3)
        """
        return Stage(seat % self.stages, self.stages)

    def ring(self, stage: int) -> tuple[int, ...]:
        """Return the seats that sum their gradients: those that hold the same layers.

        >>> Shape(3, 2).ring(1)
        (1, 3, 5)
        """
        return tuple(self.seat(replica, stage) for replica in range(self.replicas))

    def replica(self, replica: int) -> tuple[int, ...]:
        """Return the seats of one model replica, by stage; they pass activations to one another.

        >>> Shape(3, 2).replica(1)
        (2, 3)
        """
        return tuple(self.seat(replica, stage) for stage in range(self.stages))


def useful_shape(available: int, minimum: int, maximum: int, shards: int, cuts: Sequence[int]) -> Shape | None:
    """Return the shape to form out of `available` workers; None if `minimum` or a single replica cannot be formed.

    `cuts`: the numbers of stages that the model can be partitioned into, the requested one first; a later one is used
    only if not even one replica of those before it can be formed. The shape has the fewest replicas that keep the
    shards per replica as low as the largest number would: a further replica would make no step faster. `minimum` is
    formed even without a gain.

    >>> [useful_shape(n, 1, 8, 12, (1,)).replicas for n in (1, 2, 5, 6, 8)]
    [1, 2, 4, 6, 6]
    >>> [useful_shape(n, 1, 8, 12, (4, 2, 1)) for n in (8, 7, 3, 1)]
    [Shape(replicas=2, stages=4), Shape(replicas=1, stages=4), Shape(replicas=1, stages=2), Shape(replicas=1, stages=1)]
    """
    if available < minimum:
        return None
    for stages in cuts:
        most = min(min(available, maximum) // stages, shards)
        if most:
            return Shape(useful_size(most, min(most, math.ceil(minimum / stages)), most, shards), stages)
    return None


def seated(
    before: Sequence[str],
    old: Shape,
    available: Collection[str],
    new: Shape,
    holding: Mapping[str, int] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return which of the `available` workers sits in each seat of `new`.

    `before`: the workers by seat in `old`. `holding`: for some workers, the stage of `new` whose state they have.

    A worker changes its stage only if necessary, since its state would have to come from another. A replica that
    continues keeps its remaining members. Its holes are filled by members of the same stage from replicas that do not
    continue, then by workers without a seat, then by any. If the number of stages changes, workers at the front stay at
    the front.

    >>> seated(("a0", "a1", "b0", "b1"), Shape(2, 2), ("a0", "b0", "b1", "x"), Shape(2, 2))
    ('a0', 'x', 'b0', 'b1')
    >>> seated(("a0", "a1", "b0", "b1"), Shape(2, 2), ("a0", "b1"), Shape(1, 2))
    ('a0', 'b1')
    """
    return _at_home(_seated(before, old, available, new), new, holding)


def _at_home(seats: Sequence[str], shape: Shape, holding: Mapping[str, int]) -> tuple[str, ...]:
    """Swap workers that hold the stage of each other's seat."""
    found = list(seats)
    for seat in range(shape.size):
        stage = shape.place(seat)[1]
        if holding.get(found[seat]) == stage:
            continue
        for other in range(shape.size):
            if holding.get(found[other]) == stage != shape.place(other)[1]:
                found[seat], found[other] = found[other], found[seat]
                break
    return tuple(found)


def _seated(before: Sequence[str], old: Shape, available: Collection[str], new: Shape) -> tuple[str, ...]:
    members = [worker for worker in before if worker in available]
    fresh = [worker for worker in available if worker not in members]
    if not members or old.stages != new.stages:
        by_stage = sorted(members, key=lambda worker: old.place(before.index(worker))[1]) + fresh
        return tuple(by_stage[seat % new.stages * new.replicas + seat // new.stages] for seat in range(new.size))
    rows = [
        [before[seat] if before[seat] in available else None for seat in old.replica(replica)]
        for replica in range(old.replicas)
    ]
    fullest = sorted(range(old.replicas), key=lambda replica: (rows[replica].count(None), replica))
    kept = [rows[replica] for replica in sorted(fullest[: new.replicas])]
    kept += [[None] * new.stages for _ in range(new.replicas - len(kept))]
    staying = {worker for row in kept for worker in row}
    moving = [
        [row[stage] for row in rows if row[stage] is not None and row[stage] not in staying]
        for stage in range(old.stages)
    ]
    seats: list[str | None] = []
    for row in kept:
        for stage, worker in enumerate(row):
            seats.append(worker or (moving[stage].pop(0) if moving[stage] else None))
    others = [*fresh, *(worker for stage in moving for worker in stage)]
    return tuple(worker if worker is not None else str(others.pop(0)) for worker in seats)
