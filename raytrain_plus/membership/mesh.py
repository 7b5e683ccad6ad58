"""Assign workers to places in the group, and derive which workers communicate. Pure.

A group has named axes. A place is the coordinates along them; a seat is its number: first the seats of replica 0, by
stage and tensor rank, then those of replica 1. A replica holds one whole copy of the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from types import MappingProxyType
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Stage:
    """A position in a model replica: the part of the model that is held there.

    `number`: counted from the model's front, out of `of` stages. `rank`: which share of the stage's tensor slices, out
    of `ranks`.
    """

    number: int = 0
    of: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def layout(self) -> tuple[int, int]:
        """The numbers of stages and of tensor ranks of the replica."""
        return self.of, self.ranks

    @property
    def index(self) -> int:
        """Its place among all positions of the replica."""
        return self.number * self.ranks + self.rank


def stages_of(count: int, ranks: int = 1) -> list[Stage]:
    """Return the positions of a replica of `count` stages with `ranks` tensor ranks each, in the order of its seats."""
    return [Stage(number, count, rank, ranks) for number in range(count) for rank in range(ranks)]


def rank_counts(slices: int) -> tuple[int, ...]:
    """Return the numbers of workers that can share the tensor slices of a stage, the largest first.

    >>> rank_counts(4)
    (4, 2, 1)
    """
    return tuple(slices >> shift for shift in range(slices.bit_length()))


def hosted_slices(slices: int, rank: int, ranks: int) -> range:
    """Return the tensor slices that a worker with this rank hosts: consecutive ones, equally many on each.

    >>> [list(hosted_slices(4, rank, 2)) for rank in range(2)]
    [[0, 1], [2, 3]]
    """
    each = slices // ranks
    return range(rank * each, (rank + 1) * each)


Donor = tuple[str, Stage]
"""A worker, and a stage that it holds or keeps a copy of."""


class Seat(NamedTuple):
    """A worker's coordinates in the shape of its group."""

    replica: int
    stage: int = 0
    tensor_rank: int = 0


Axis = Literal["replica", "stage", "tensor_rank"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a group along each axis: model replicas, stages of each, workers that share the tensors of each."""

    replicas: int
    stages: int = 1
    tensor_ranks: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of a place's coordinates."""
        return (self.replicas, self.stages, self.tensor_ranks)

    @property
    def size(self) -> int:
        """The number of seats."""
        return math.prod(self.sizes)

    def places(self) -> list[Seat]:
        """Return the place of every seat, in order: the last coordinate changes first.

        >>> Shape(2, 3).places()[4]
        Seat(replica=1, stage=1, tensor_rank=0)
        """
        return list(starmap(Seat, product(*map(range, self.sizes))))

    def place(self, seat: int) -> Seat:
        """Return the place of a seat."""
        return self.places()[seat]

    def stage(self, seat: int) -> Stage:
        """Return the stage that a seat holds.

        >>> Shape(2, 3).stage(4)
        Stage(number=1, of=3, rank=0, ranks=1)
        """
        place = self.place(seat)
        return Stage(place.stage, self.stages, place.tensor_rank, self.tensor_ranks)

    @property
    def layout(self) -> tuple[int, int]:
        """The numbers of stages and of tensor ranks of each replica."""
        return self.stages, self.tensor_ranks

    def lines(self, *axes: Axis) -> list[tuple[int, ...]]:
        """Return the groups of seats that differ along these axes only, each in the order of its seats.

        The members of a line along the replicas, a ring, hold the same state and sum their gradients; those of a line
        along all other axes are one replica.

        >>> Shape(3, 2).lines("replica"), Shape(3, 2).lines("stage", "tensor_rank")
        ([(0, 2, 4), (1, 3, 5)], [(0, 1), (2, 3), (4, 5)])
        """
        found: dict[Seat, list[int]] = {}
        for seat, place in enumerate(self.places()):
            found.setdefault(place._replace(**dict.fromkeys(axes, 0)), []).append(seat)
        return list(map(tuple, found.values()))


def seated(
    before: Sequence[str],
    old: Shape,
    available: Collection[str],
    new: Shape,
    holding: Mapping[str, int] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return which of the `available` workers sits in each seat of `new`.

    `before`: the workers by seat in `old`. `holding`: for some workers, the index of the stage of `new` whose state
    they have.

    A worker changes its stage only if necessary, since its state would have to come from another. A replica that
    continues keeps its remaining members. Its holes are filled by members of the same ring from replicas that do not
    continue, then by workers without a seat, then by any. If the number of stages or tensor ranks changes, workers at
    the front stay at the front.

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
        stage = shape.stage(seat).index
        if holding.get(found[seat]) == stage:
            continue
        for other in range(shape.size):
            if holding.get(found[other]) == stage != shape.stage(other).index:
                found[seat], found[other] = found[other], found[seat]
                break
    return tuple(found)


def _seated(before: Sequence[str], old: Shape, available: Collection[str], new: Shape) -> tuple[str, ...]:
    members = [worker for worker in before if worker in available]
    fresh = [worker for worker in available if worker not in members]
    if not members or old.sizes[1:] != new.sizes[1:]:
        front_first = sorted(members, key=lambda worker: old.place(before.index(worker))[1:]) + fresh
        seats_of = [seat for ring in new.lines("replica") for seat in ring]
        return tuple(front_first[seats_of.index(seat)] for seat in range(new.size))
    rows, moving = _rows(before, old, available, new)
    seats: list[str | None] = []
    for row in rows:
        for worker, ring in zip(row, moving, strict=True):
            seats.append(worker or (ring.pop(0) if ring else None))
    others = [*fresh, *(worker for ring in moving for worker in ring)]
    return tuple(worker if worker is not None else str(others.pop(0)) for worker in seats)


def remaining(before: Sequence[str], old: Shape, available: Collection[str], new: Shape) -> tuple[str | None, ...]:
    """Return, for each seat of `new`, the worker that sat there in a replica that continues; None if it is empty.

    The arguments are those of `seated`. With another number of stages or tensor ranks no replica continues.

    >>> remaining(("a0", "a1", "b0", "b1"), Shape(2, 2), ("a0", "b0", "b1"), Shape(2, 2))
    ('a0', None, 'b0', 'b1')
    """
    if old.layout != new.layout or not set(before) & set(available):
        return (None,) * new.size
    return tuple(worker for row in _rows(before, old, available, new)[0] for worker in row)


def _rows(
    before: Sequence[str], old: Shape, available: Collection[str], new: Shape
) -> tuple[list[list[str | None]], list[list[str]]]:
    """Return the workers that remain in each replica of `new`, and for each ring those of replicas left out."""
    replicas = old.lines("stage", "tensor_rank")
    rows = [[before[seat] if before[seat] in available else None for seat in replica] for replica in replicas]
    fullest = sorted(range(old.replicas), key=lambda replica: (rows[replica].count(None), replica))
    kept = [rows[replica] for replica in sorted(fullest[: new.replicas])]
    kept += [[None] * len(rows[0]) for _ in range(new.replicas - len(kept))]
    staying = {worker for row in kept for worker in row}
    rings = zip(*rows, strict=True)
    return kept, [[worker for worker in ring if worker is not None and worker not in staying] for ring in rings]
