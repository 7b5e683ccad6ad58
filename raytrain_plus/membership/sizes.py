"""Compute which group to form out of how many workers, and how long to wait before replacing lost ones. Pure.

The group for each number of workers is computed once from the job, in a `SizeTable`, and looked up wherever a size is
judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raytrain_plus.membership.mesh import Shape, rank_counts

VERY_MANY = 1_000_000
STARVED_STEPS = 100
"""Steps within which a second lack of memory ends the run: a microbatch that is too large fails at once."""
FRUITLESS = 10
"""Number of consecutive failures without a committed step between them that end a run."""


def useful_size(available: int, minimum: int, maximum: int, shards: int) -> int:
    """Return the number of workers to form out of `available`, or 0 if fewer than `minimum` are available.

    It is the smallest number with as few shards per replica as the largest possible number would give: a further worker
    would make no step faster. `minimum` is formed even without a gain.

    >>> [useful_size(n, 1, 8, 12) for n in (1, 2, 5, 6, 8)]
    [1, 2, 4, 6, 6]
    """
    if available < minimum:
        return 0
    largest = min(available, maximum, shards)
    per_replica = math.ceil(shards / max(largest, 1))
    return max(minimum, math.ceil(shards / per_replica))


@dataclass(frozen=True, slots=True)
class SizeTable:
    """The shape of the group for each number of available workers, and the numbers of the job that decide it.

    A shape has the fewest replicas that keep the shards per replica as low as the largest number would: a further
    replica would make no step faster. The minimum is formed even without a gain. With fewer workers, the number of
    replicas falls first, then that of tensor ranks, then that of stages.

    >>> table = SizeTable(1, 8, 12, (4, 2, 1))
    >>> [table.shape(n).sizes for n in (99, 8, 7, 3, 1)]
    [(2, 4, 1), (2, 4, 1), (1, 4, 1), (1, 2, 1), (1, 1, 1)]
    >>> table = SizeTable(1, 8, 12, (2, 1), slices=2)
    >>> [table.shape(n).sizes for n in (8, 7, 3, 1)]
    [(2, 2, 2), (1, 2, 2), (1, 2, 1), (1, 1, 1)]
    """

    minimum: int
    """The requested minimum: see `fewest`."""
    maximum: int
    shards: int
    stage_counts: tuple[int, ...] = (1,)
    """The numbers of stages that the model can be partitioned into, the requested one first; a later one is used only
    if not even one replica of those before it can be formed."""
    slices: int = 1
    """The number of slices of each tensor that is cut, a power of two."""
    unfit: frozenset[tuple[int, int]] = frozenset()
    """Numbers of stages and of tensor ranks with which some stage's share is too large for a worker."""
    layouts: tuple[tuple[int, int], ...] = field(init=False, compare=False, repr=False)
    """The possible numbers of stages and of tensor ranks, in the order in which they are tried."""
    shapes: tuple[Shape | None, ...] = field(init=False, compare=False, repr=False)
    """By the number of workers, from 0 to the largest that can have work; None if no group can be formed."""

    def __post_init__(self) -> None:
        both = ((stages, ranks) for stages in self.stage_counts for ranks in rank_counts(self.slices))
        object.__setattr__(self, "layouts", tuple(layout for layout in both if layout not in self.unfit))
        most = max(self.minimum, min(self.maximum, self.shards * max(stages * ranks for stages, ranks in self.layouts)))
        object.__setattr__(self, "shapes", tuple(map(self._shape, range(most + 1))))

    def shape(self, available: int) -> Shape | None:
        """Return the shape to form out of `available` workers; None if they are too few."""
        return self.shapes[min(available, len(self.shapes) - 1)]

    @property
    def formed(self) -> dict[int, Shape]:
        """The shape for each number of workers in the table that can form a group."""
        return {workers: shape for workers, shape in enumerate(self.shapes) if shape is not None}

    @property
    def largest(self) -> Shape | None:
        """The shape for any larger number of workers; None if no group can be formed at all."""
        return self.shapes[-1]

    @property
    def fewest(self) -> int:
        """The minimum number of members: fewer workers than the smallest layout has cannot hold the model."""
        return max(self.minimum, min(stages * ranks for stages, ranks in self.layouts))

    @property
    def useful(self) -> int:
        """The largest number of members that is ever formed."""
        return self.fewest if self.largest is None else max(self.fewest, self.largest.size)

    def fewest_replicas(self, stages: int, ranks: int = 1) -> int:
        """Return the smallest number of replicas of `stages` stages, of `ranks` workers each."""
        if ranks < self.slices:
            # Slices are hosted on fewer workers only where they make one replica.
            return 1
        return max(1, min(self.minimum // (stages * ranks), self.shards))

    def most_shards(self, stages: int, ranks: int = 1) -> int:
        """Return the most shards that such a replica hosts, given the smallest number of replicas."""
        return math.ceil(self.shards / self.fewest_replicas(stages, ranks))

    def _shape(self, available: int) -> Shape | None:
        for stages, ranks in self.layouts if available >= self.minimum else ():
            most = min(min(available, self.maximum) // (stages * ranks), self.shards)
            if most:
                fewest = min(most, math.ceil(self.minimum / (stages * ranks)))
                return Shape(useful_size(most, fewest, most, self.shards), stages, ranks)
        return None


def backoff_s(fruitless: int) -> float:
    """Return the seconds to wait before lost workers are replaced, after `fruitless` failures with no step between.

    >>> [backoff_s(n) for n in (0, 1, 2, 3, 9)]
    [0.0, 0.0, 1.0, 2.0, 30.0]
    """
    return 0.0 if fruitless < 2 else min(30.0, 2.0 ** (fruitless - 2))


def room_for(nodes: Sequence[Mapping[str, float]], need: Mapping[str, float]) -> int:
    """Return how many workers that each need `need` fit on nodes with these resources; no worker spans two nodes.

    If a worker needs nothing, any node has room for `VERY_MANY`.
    """
    needed = {name: amount for name, amount in need.items() if amount > 0}
    if not needed:
        return VERY_MANY * len(nodes)
    return sum(min(int((node.get(name, 0.0) + 1e-9) // amount) for name, amount in needed.items()) for node in nodes)
