"""Compute how many workers to form and how long to wait before replacing lost ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

VERY_MANY = 1_000_000
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


def backoff_s(fruitless: int) -> float:
    """Return the seconds to wait before lost workers are replaced, after so many failures without a step between them.

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
