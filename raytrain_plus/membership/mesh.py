"""Who holds which place: seats in cells of stages, and who talks to whom. Pure.

A seat is a number: the seats of cell 0, by stage, then those of cell 1. A cell holds one whole copy of the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from raytrain_plus.membership.sizes import useful_size


@dataclass(frozen=True, slots=True)
class Stage:
    """A position in a cell: its number, counted from the model's front, of so many."""

    number: int = 0
    of: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """So many cells, each of so many stages."""

    cells: int
    stages: int = 1

    @property
    def size(self) -> int:
        """The number of seats."""
        return self.cells * self.stages

    def seat(self, cell: int, stage: int) -> int:
        """The number of a seat."""
        return cell * self.stages + stage

    def place(self, seat: int) -> tuple[int, int]:
        """A seat's cell and stage.

        >>> Shape(2, 3).place(4)
        (1, 1)
        """
        return divmod(seat, self.stages)

    def stage(self, seat: int) -> Stage:
        """What is held there.

        >>> Shape(2, 3).stage(4)
        Stage(number=1, of=3)
        """
        return Stage(seat % self.stages, self.stages)

    def ring(self, stage: int) -> tuple[int, ...]:
        """The seats that sum their gradients: those that hold the same layers.

        >>> Shape(3, 2).ring(1)
        (1, 3, 5)
        """
        return tuple(self.seat(cell, stage) for cell in range(self.cells))

    def cell(self, cell: int) -> tuple[int, ...]:
        """The seats that hand activations on to one another, by stage.

        >>> Shape(3, 2).cell(1)
        (2, 3)
        """
        return tuple(self.seat(cell, stage) for stage in range(self.stages))


def useful_shape(available: int, minimum: int, maximum: int, shards: int, cuts: Sequence[int]) -> Shape | None:
    """What to form out of `available` workers; None where `minimum` cannot be had, or no cell.

    `cuts`: the numbers of stages that the model can be cut into, the wished one first; a later one is taken only where
    not even one cell of those before it can be formed. Of cells there are the fewest with as few shards for each as
    the most would have: a further cell would make no step faster. `minimum` is formed, gain or not.

    >>> [useful_shape(n, 1, 8, 12, (1,)).cells for n in (1, 2, 5, 6, 8)]
    [1, 2, 4, 6, 6]
    >>> [useful_shape(n, 1, 8, 12, (4, 2, 1)) for n in (8, 7, 3, 1)]
    [Shape(cells=2, stages=4), Shape(cells=1, stages=4), Shape(cells=1, stages=2), Shape(cells=1, stages=1)]
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
    """Who sits where in `new`: `new.size` of the `available`, by seat; `before`, by seat in `old`, is who sat where.
    `holding`: of which stage of `new` some have the state.

    Nobody changes the stage without need, since its state would have to come from another. A cell that goes on keeps
    who is left of it. Its holes are filled by members of the same stage out of cells that do not go on, then by those
    who had no seat, then by any. Where the number of stages changes, who was at the front stays at the front.

    >>> seated(("a0", "a1", "b0", "b1"), Shape(2, 2), ("a0", "b0", "b1", "x"), Shape(2, 2))
    ('a0', 'x', 'b0', 'b1')
    >>> seated(("a0", "a1", "b0", "b1"), Shape(2, 2), ("a0", "b1"), Shape(1, 2))
    ('a0', 'b1')
    """
    return _at_home(_seated(before, old, available, new), new, holding)


def _at_home(seats: Sequence[str], shape: Shape, holding: Mapping[str, int]) -> tuple[str, ...]:
    """Has those change places who hold the stage of another's seat."""
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
        return tuple(by_stage[seat % new.stages * new.cells + seat // new.stages] for seat in range(new.size))
    rows = [
        [before[seat] if before[seat] in available else None for seat in old.cell(cell)] for cell in range(old.cells)
    ]
    fullest = sorted(range(old.cells), key=lambda cell: (rows[cell].count(None), cell))
    kept = [rows[cell] for cell in sorted(fullest[: new.cells])]
    kept += [[None] * new.stages for _ in range(new.cells - len(kept))]
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
