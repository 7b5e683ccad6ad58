"""How many workers to form. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def useful_size(available: int, minimum: int, maximum: int, shards: int) -> int:
    """The number of workers to form out of `available`, or 0 where `minimum` cannot be had.

    The smallest number with as few shards per cell as the largest possible number would give: a further worker would
    make no step faster. `minimum` is formed, gain or not.

    >>> [useful_size(n, 1, 8, 12) for n in (1, 2, 5, 6, 8)]
    [1, 2, 4, 6, 6]
    """
    if available < minimum:
        return 0
    largest = min(available, maximum, shards)
    per_cell = math.ceil(shards / max(largest, 1))
    return max(minimum, math.ceil(shards / per_cell))


def room_for(nodes: Sequence[Mapping[str, float]], need: Mapping[str, float]) -> int:
    """How many workers that each need `need` fit on nodes with these resources; no worker spans two nodes."""
    return sum(
        min((int((node.get(name, 0.0) + 1e-9) // amount) for name, amount in need.items() if amount > 0), default=0)
        for node in nodes
    )
