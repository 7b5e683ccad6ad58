"""Partition a model's layers into stages. Pure.

The time of a step grows with its largest stage, so the largest sum of costs is minimized over all partitions that fit
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
    cost: int = 0
    """Its `counted_cost`, which is the same in every run; 0 if the schedule does not need it."""
    sliced_bytes: int = 0
    """Those of its bytes that belong to tensor slices, all of them together."""
    sliced_parameters: int = 0
    """Those of its trained values that are in tensor slices."""
    copied: int = 0
    """Those of its trained values that are a copy of a tied parameter of another layer."""
    sliced_copied: int = 0
    """Those of them that are in tensor slices."""

    @property
    def own_parameters(self) -> int:
        """Number of its trained values, for people; a tied parameter counts in one layer only."""
        return self.parameters - self.copied


PER_VALUE = 10
"""Operations that take about as long as moving one value through memory, forward and backward."""


def counted_cost(operations: int, parameters: int, elements: int) -> int:
    """Return the cost of a layer in operations, without a clock.

    `operations`: those of matrix products, convolutions and attention, forward and backward. Other operations take as
    long as their values take to load, so each of the `parameters` and of the `elements` of the layer's output counts
    as `PER_VALUE` operations.

    >>> counted_cost(operations=1000, parameters=50, elements=20), counted_cost(0, 0, 20)
    (1700, 200)
    """
    return operations + PER_VALUE * (parameters + elements)


LayerSpan = tuple[int, int]
"""The layers [first, last)."""


def balanced_spans(
    layers: Sequence[Layer], stages: int, most_bytes: int | None = None, *, counted: bool = False
) -> tuple[LayerSpan, ...] | None:
    """Return the layers of each stage, at least one, in order; None if no partition keeps every stage within
    `most_bytes`.

    It balances the layers' seconds or, if `counted`, their counted costs. Takes O(stages x layers^2). Raises
    `ValueError` if there are fewer layers than stages.

    >>> each = [Layer(str(number), seconds, 0) for number, seconds in enumerate((1, 1, 1, 1, 4))]
    >>> balanced_spans(each, 2)
    ((0, 4), (4, 5))
    """
    count = len(layers)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot be partitioned into {stages} stages")
    costs = [0.0, *itertools.accumulate(layer.cost if counted else layer.seconds for layer in layers)]
    sizes = [0, *itertools.accumulate(layer.bytes for layer in layers)]

    def cost_of(first: int, last: int) -> float:
        fits = most_bytes is None or sizes[last] - sizes[first] <= most_bytes
        return costs[last] - costs[first] if fits else math.inf

    largest, _ = _cheapest(count, stages, cost_of, max)
    if math.isinf(largest):
        return None
    # A separate pass: in an even partition, the first layers can be divided otherwise than is best for them alone.
    _, spans = _cheapest(
        count, stages, lambda first, last: here**2 if (here := cost_of(first, last)) <= largest else math.inf, add
    )
    return spans


def _cheapest(
    count: int, stages: int, cost: Callable[[int, int], float], joined: Callable[[float, float], float]
) -> tuple[float, tuple[LayerSpan, ...]]:
    """Return the partition with the least cost, `joined` over its stages, and that cost."""
    # For the first `last` layers: (the cost, the first layer of the last stage).
    none = (math.inf, count)
    table: list[list[tuple[float, int]]] = [[(0.0, 0), *([none] * count)]]
    for number in range(1, stages + 1):
        row = [none] * (count + 1)
        for last in range(number, count - (stages - number) + 1):
            for first in range(last - 1, number - 2, -1):
                alone = cost(first, last)
                if alone > row[last][0]:
                    # A stage with more layers costs even more.
                    break
                row[last] = min(row[last], (joined(table[-1][first][0], alone), first))
        table.append(row)
    spans: list[LayerSpan] = []
    last = count
    for number in range(stages, 0, -1):
        first = table[number][last][1]
        spans.append((first, last))
        last = first
    return table[stages][count][0], tuple(reversed(spans))
