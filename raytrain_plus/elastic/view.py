"""Views: who is in the group and hosts what. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    members: tuple[Member, ...]


def host_shards(shards: int, cells: int) -> tuple[tuple[int, ...], ...]:
    """Which shards each cell hosts: consecutive, as even as can be, the larger shares first (8 on 3: 3, 3, 2).

    >>> host_shards(8, 3)
    ((0, 1, 2), (3, 4, 5), (6, 7))
    """
    base, extra = divmod(shards, cells)
    sizes = [base + (cell < extra) for cell in range(cells)]
    starts = [sum(sizes[:cell]) for cell in range(cells)]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))


def form_view(generation: int, workers: Sequence[str], shards: int) -> View:
    """A view of one-worker cells over `workers`, in their order."""
    hosted = host_shards(shards, len(workers))
    return View(
        generation=generation,
        members=tuple(
            Member(worker=worker, cell=cell, stage=0, shards=hosted[cell]) for cell, worker in enumerate(workers)
        ),
    )
