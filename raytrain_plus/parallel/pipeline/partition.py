"""Where a model's layers are cut into stages. Pure.

The time of a step grows with the slowest stage, so the largest sum of costs is made as small as it can be, over all
cuts between layers that fit the memory ("linear partition", solved by dynamic programming; Skiena, "The Algorithm
Design Manual", section 10.7). Of several such cuts the most even one is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer costs."""

    name: str
    seconds: float
    """Of one microbatch, forward and backward."""
    bytes: int
    """What a worker keeps of it: parameters, gradients, optimizer state."""
    parameters: int = 0
    """Numbers that it trains."""
    activations: int = 0
    """Bytes that it keeps of each microbatch between its forward and its backward pass."""


Span = tuple[int, int]
"""Layers [first, last)."""


def cut(layers: Sequence[Layer], stages: int, most_bytes: int | None = None) -> tuple[Span, ...] | None:
    """The layers of each stage, at least one, in order; None where no cut leaves every stage within `most_bytes`.

    Takes O(stages x layers^2). Raises `ValueError` where there are fewer layers than stages.

    >>> each = [Layer(str(number), seconds, 0) for number, seconds in enumerate((1, 1, 1, 1, 4))]
    >>> cut(each, 2)
    ((0, 4), (4, 5))
    """
    count = len(layers)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot be cut into {stages} stages")
    seconds = [0.0, *itertools.accumulate(layer.seconds for layer in layers)]
    sizes = [0, *itertools.accumulate(layer.bytes for layer in layers)]

    def time_of(first: int, last: int) -> float:
        fits = most_bytes is None or sizes[last] - sizes[first] <= most_bytes
        return seconds[last] - seconds[first] if fits else math.inf

    slowest, _ = _cheapest(count, stages, time_of, max)
    if math.isinf(slowest):
        return None
    # In a pass of its own: the first layers of an even cut may well be cut otherwise than they were best alone.
    _, spans = _cheapest(
        count, stages, lambda first, last: here**2 if (here := time_of(first, last)) <= slowest else math.inf, add
    )
    return spans


def _cheapest(
    count: int, stages: int, cost: Callable[[int, int], float], joined: Callable[[float, float], float]
) -> tuple[float, tuple[Span, ...]]:
    """Of all cuts of so many layers that with the least cost, `joined` over its stages, and this cost."""
    # Of the first `last` layers: (the cost, where the last stage begins).
    none = (math.inf, -1)
    table: list[list[tuple[float, int]]] = [[(0.0, 0), *([none] * count)]]
    for number in range(1, stages + 1):
        row = [none] * (count + 1)
        for last in range(number, count - (stages - number) + 1):
            row[last] = min(
                (joined(table[-1][first][0], cost(first, last)), first) for first in range(number - 1, last)
            )
        table.append(row)
    spans: list[Span] = []
    last = count
    for number in range(stages, 0, -1):
        first = table[number][last][1]
        spans.append((first, last))
        last = first
    return table[stages][count][0], tuple(reversed(spans))
