"""Views: who is in the group and hosts what. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_plus.membership.mesh import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One worker's place in a view."""

    worker: str
    cell: int
    stage: int
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The group of one generation."""

    generation: int
    shape: Shape
    members: tuple[Member, ...]
    """By seat."""


def host_shards(shards: int, cells: int) -> tuple[tuple[int, ...], ...]:
    """Which shards each cell hosts: consecutive, as even as can be, the larger shares first (8 on 3: 3, 3, 2).

    >>> host_shards(8, 3)
    ((0, 1, 2), (3, 4, 5), (6, 7))
    """
    base, extra = divmod(shards, cells)
    sizes = [base + (cell < extra) for cell in range(cells)]
    starts = [sum(sizes[:cell]) for cell in range(cells)]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))


def form_view(generation: int, seats: Sequence[str], shape: Shape, shards: int) -> View:
    """A view of that shape; `seats`: who sits where. All stages of a cell have to do with its shards."""
    hosted = host_shards(shards, shape.cells)
    places = [shape.place(seat) for seat in range(shape.size)]
    return View(
        generation=generation,
        shape=shape,
        members=tuple(
            Member(worker=worker, cell=cell, stage=stage, shards=hosted[cell])
            for worker, (cell, stage) in zip(seats, places, strict=True)
        ),
    )
