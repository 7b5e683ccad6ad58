"""Partitions are optimal and fit the memory."""

from __future__ import annotations

import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.parallel.pipeline import partition as module
from raytrain_plus.parallel.pipeline.partition import Layer, LayerSpan, balanced_spans


def layers_of(*costs: tuple[float, int]) -> list[Layer]:
    return [Layer(f"layer {number}", seconds, size) for number, (seconds, size) in enumerate(costs)]


def all_cuts(count: int, stages: int) -> list[tuple[LayerSpan, ...]]:
    """Yield every possible partition."""
    found = []
    for borders in itertools.combinations(range(1, count), stages - 1):
        edges = (0, *borders, count)
        found.append(tuple(itertools.pairwise(edges)))
    return found


def worth(layers: list[Layer], spans: tuple[LayerSpan, ...]) -> tuple[float, float]:
    sums = [sum(layer.seconds for layer in layers[first:last]) for first, last in spans]
    return max(sums), sum(one * one for one in sums)


def fits(layers: list[Layer], spans: tuple[LayerSpan, ...], most: int) -> bool:
    return all(sum(layer.bytes for layer in layers[first:last]) <= most for first, last in spans)


def test_the_docstring_examples() -> None:
    assert doctest.testmod(module).failed == 0


def test_counted_costs_are_balanced_without_times() -> None:
    layers = [Layer(name, seconds, 0, cost=cost) for name, seconds, cost in (("a", 9, 1), ("b", 1, 1), ("c", 1, 2))]
    assert balanced_spans(layers, 2) == ((0, 1), (1, 3))
    assert balanced_spans(layers, 2, counted=True) == ((0, 2), (2, 3))


@given(
    costs=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=9),
    stages=st.integers(1, 5),
    most=st.integers(0, 80),
)
def test_no_other_partition_is_better(costs: list[tuple[int, int]], stages: int, most: int) -> None:
    layers = layers_of(*costs)
    if stages > len(layers):
        with pytest.raises(ValueError, match="cannot be partitioned"):
            balanced_spans(layers, stages)
        return
    every = all_cuts(len(layers), stages)
    found = balanced_spans(layers, stages)
    assert found in every
    assert worth(layers, found) == min(worth(layers, spans) for spans in every)
    able = [spans for spans in every if fits(layers, spans, most)]
    within = balanced_spans(layers, stages, most)
    if not able:
        assert within is None
    else:
        assert within is not None
        assert fits(layers, within, most)
        assert worth(layers, within) == min(worth(layers, spans) for spans in able)


def test_an_even_partition_need_not_be_best_for_its_first_layers() -> None:
    # ((0, 2), (2, 3), ...) is as slow, and less even.
    assert balanced_spans(layers_of((2, 0), (3, 0), (5, 0), (1, 0), (6, 0)), 4) == ((0, 1), (1, 2), (2, 4), (4, 5))


def test_a_balanced_partition_beats_equal_layer_counts() -> None:
    # An embedding and a head beside blocks of equal cost.
    layers = layers_of((1, 0), *[(10, 0)] * 6, (25, 0))
    found = balanced_spans(layers, 4)
    assert found is not None
    assert worth(layers, found)[0] == 25
    assert worth(layers, ((0, 2), (2, 4), (4, 6), (6, 8)))[0] == 35


def test_many_layers_are_partitioned_fast() -> None:
    layers = layers_of(*[(1.0 + number % 7, 1) for number in range(200)])
    found = balanced_spans(layers, 16)
    assert found is not None
    assert worth(layers, found)[0] <= sum(layer.seconds for layer in layers) / 16 + 7
