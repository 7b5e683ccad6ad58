"""Where a model's layers are cut into stages. Pure.

The time of a step grows with the slowest stage, so the largest sum of costs is made as small as it can be, over all
cuts between layers that fit the memory ("linear partition", solved by dynamic programming; Skiena, "The Algorithm
Design Manual", section 10.7). Of several such cuts the most even one is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


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
    # Of the first `last` layers: (the slowest stage, the sum of squares, where the last stage begins).
    none = (math.inf, math.inf, -1)
    table: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0), *([none] * count)]]
    for number in range(1, stages + 1):
        row = [none] * (count + 1)
        for last in range(number, count - (stages - number) + 1):
            for first in range(number - 1, last):
                slowest, squares, _ = table[-1][first]
                if math.isinf(slowest) or (most_bytes is not None and sizes[last] - sizes[first] > most_bytes):
                    continue
                here = seconds[last] - seconds[first]
                row[last] = min(row[last], (max(slowest, here), squares + here * here, first))
        table.append(row)
    if math.isinf(table[stages][count][0]):
        return None
    spans: list[Span] = []
    last = count
    for number in range(stages, 0, -1):
        first = table[number][last][2]
        spans.append((first, last))
        last = first
    return tuple(reversed(spans))
