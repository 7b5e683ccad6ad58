"""Partition a model's layers into stages. Pure.

The time of a step grows with its slowest stage, so the largest sum of costs is minimized over all partitions that fit
the memory ("linear partition", solved by dynamic programming; Skiena, "The Algorithm Design Manual", section 10.7).
Among equally good partitions the most even one is chosen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add


@dataclass(frozen=True, slots=True)
class Layer:
    """The cost of one layer."""

    name: str
    seconds: float
    """Forward and backward pass of one microbatch."""
    bytes: int
    """Bytes that a worker keeps for it: parameters, gradients, optimizer state."""
    parameters: int = 0
    """Number of trained values."""
    activations: int = 0
    """Bytes that it keeps of each microbatch between its forward and its backward pass."""


LayerSpan = tuple[int, int]
"""The layers [first, last)."""


def balanced_spans(layers: Sequence[Layer], stages: int, most_bytes: int | None = None) -> tuple[LayerSpan, ...] | None:
    """Return the layers of each stage, at least one, in order; None if no partition keeps every stage within
    `most_bytes`.

    Takes O(stages x layers^2). Raises `ValueError` if there are fewer layers than stages.

    >>> each = [Layer(str(number), seconds, 0) for number, seconds in enumerate((1, 1, 1, 1, 4))]
    >>> balanced_spans(each, 2)
    ((0, 4), (4, 5))
    """
    count = len(layers)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot be partitioned into {stages} stages")
    seconds = [0.0, *itertools.accumulate(layer.seconds for layer in layers)]
    sizes = [0, *itertools.accumulate(layer.bytes for layer in layers)]

    def time_of(first: int, last: int) -> float:
        fits = most_bytes is None or sizes[last] - sizes[first] <= most_bytes
        return seconds[last] - seconds[first] if fits else math.inf

    slowest, _ = _cheapest(count, stages, time_of, max)
    if math.isinf(slowest):
        return None
    # A separate pass: in an even partition, the first layers can be divided otherwise than is best for them alone.
    _, spans = _cheapest(
        count, stages, lambda first, last: here**2 if (here := time_of(first, last)) <= slowest else math.inf, add
    )
    return spans


def _cheapest(
    count: int, stages: int, cost: Callable[[int, int], float], joined: Callable[[float, float], float]
) -> tuple[float, tuple[LayerSpan, ...]]:
    """Return the partition with the least cost, `joined` over its stages, and that cost."""
    # For the first `last` layers: (the cost, the first layer of the last stage).
    none = (math.inf, -1)
    table: list[list[tuple[float, int]]] = [[(0.0, 0), *([none] * count)]]
    for number in range(1, stages + 1):
        row = [none] * (count + 1)
        for last in range(number, count - (stages - number) + 1):
            row[last] = min(
                (joined(table[-1][first][0], cost(first, last)), first) for first in range(number - 1, last)
            )
        table.append(row)
    spans: list[LayerSpan] = []
    last = count
    for number in range(stages, 0, -1):
        first = table[number][last][1]
        spans.append((first, last))
        last = first
    return table[stages][count][0], tuple(reversed(spans))
