"""Define views: which workers are in the group and which shards each hosts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_plus.membership.mesh import Seat, Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One worker's place in a view."""

    worker: str
    place: Seat
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The group of one generation."""

    generation: int
    shape: Shape
    members: tuple[Member, ...]
    """In the order of seats."""


def host_shards(shards: int, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Return the shards that each model replica hosts: consecutive, as even as possible, the larger shares first.

    For example 8 shards on 3 replicas: 3, 3, 2.

    >>> host_shards(8, 3)
    ((0, 1, 2), (3, 4, 5), (6, 7))
    """
    base, extra = divmod(shards, replicas)
    sizes = [base + (replica < extra) for replica in range(replicas)]
    starts = [sum(sizes[:replica]) for replica in range(replicas)]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))


def form_view(generation: int, seats: Sequence[str], shape: Shape, shards: int) -> View:
    """Return a view of that shape with worker `seats[i]` in seat i. All members of a replica work on its shards."""
    hosted = host_shards(shards, shape.replicas)
    return View(
        generation=generation,
        shape=shape,
        members=tuple(
            Member(worker=worker, place=place, shards=hosted[place.replica])
            for worker, place in zip(seats, shape.places(), strict=True)
        ),
    )
