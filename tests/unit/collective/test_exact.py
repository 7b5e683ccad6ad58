"""The exact sum equals that of unbounded integers, for any order, grouping and magnitudes."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.collective.exact import LIMIT_BITS, ExactSum
from raytrain_plus.job.value_checks import EXACT_SHARDS

CPU = torch.device("cpu")
MAGNITUDES = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-1e30, 1e30, width=64),
    st.sampled_from([0.0, -0.0, 1e-30, -1e30, 2.0**-149, -(2.0**-126), 1.5, 2.0**-1074]),
)


def summed(shards: list[torch.Tensor], groups: list[list[int]], scales: dict[str, int]) -> ExactSum:
    """Return the sum over `groups` of workers, each adding its shards in the given order."""
    sums = []
    for group in groups:
        one = ExactSum({"w": shards[0].numel()}, len(shards), CPU)
        one.begin(scales)
        for shard in group:
            one.add([shards[shard]])
        sums.append(one)
    total = sums[0]
    largest = np.max([one.largest() for one in sums], axis=0)
    total.largest = lambda: largest  # type: ignore[method-assign]
    for other in sums[1:]:
        total.wire.add_(other.wire)
    return total


def settled(shards: list[torch.Tensor], groups: list[list[int]], scales: dict[str, int]) -> tuple[ExactSum, int]:
    """Return the sum, recomputed once if it did not fit, and the exponent of its quantum."""
    total = summed(shards, groups, scales)
    if not total.read().settled:
        scales = {**scales, **total.scales_from(total.largest())}
        total = summed(shards, groups, scales)
    assert total.read().settled
    return total, scales.get("w", 0)


def whole(value: float, exponent: int) -> int:
    """Return `value` in quanta, rounded to the nearest integer, ties to even."""
    return round(Fraction(value) / Fraction(2) ** exponent)


def grouping(draw: random.Random, count: int) -> list[list[int]]:
    order = list(range(count))
    draw.shuffle(order)
    cuts = sorted(draw.sample(range(1, count), draw.randrange(count))) if count > 1 else []
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


@given(
    values=st.lists(st.lists(MAGNITUDES, min_size=3, max_size=3), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    guess=st.one_of(st.none(), st.integers(-200, 100)),
    draw=st.randoms(use_true_random=False),
)
def test_the_sum_equals_that_of_unbounded_integers(
    values: list[list[float]], dtype: torch.dtype, guess: int | None, draw: random.Random
) -> None:
    shards = [torch.tensor(row, dtype=torch.float64).clamp(-3e38, 3e38).to(dtype) for row in values]
    scales = {} if guess is None else {"w": guess}
    total, exponent = settled(shards, grouping(draw, len(shards)), scales)
    for column, got in enumerate(total.sums[0].tolist()):
        rounded = [whole(float(shard[column]), exponent) for shard in shards]
        assert Fraction(got) == sum(rounded) * Fraction(2) ** exponent
        true = sum(Fraction(float(shard[column])) for shard in shards)
        assert abs(Fraction(got) - true) <= len(shards) * Fraction(2) ** exponent / 2
    # Fine enough: the largest value of all is represented to at least 2^-30 of itself.
    largest = max(float(shard.abs().max()) for shard in shards)
    if largest > 2.0**-1000:
        assert Fraction(2) ** exponent <= Fraction(largest) * len(shards) / 2**29
    # Another order, another grouping, another way to the same grid: the same bits and the same next grid.
    other = summed(shards, grouping(draw, len(shards)), {"w": exponent} if largest else scales)
    assert torch.equal(other.wire, total.wire)
    assert other.read() == total.read()


def test_the_next_grid_follows_the_values_without_a_retry() -> None:
    generator = torch.Generator().manual_seed(0)
    scales: dict[str, int] = {}
    tries = 0
    for step in range(200):
        size = 10.0 ** (-30 + 60 * step / 199)
        shards = [torch.randn(50, generator=generator, dtype=torch.float64) * size for _ in range(12)]
        total = summed(shards, [list(range(12))], scales)
        if not total.read().settled:
            tries += 1
            total, _ = settled(shards, [list(range(12))], scales)
        scales = dict(total.read().scales)
        largest = max(float(shard.abs().max()) for shard in shards)
        assert 2.0 ** scales["w"] <= largest * 2.0**-40
    assert tries == 1  # the first step, without a known grid


@pytest.mark.parametrize("count", [1, 2, 33, 512, EXACT_SHARDS])
def test_an_overflow_is_detected_and_resolved_for_any_number_of_shards(count: int) -> None:
    shards = [torch.tensor([1e30, -3.0]) for _ in range(count)]
    total = summed(shards, [list(range(count))], {"w": -100})
    assert not total.read().settled
    total, exponent = settled(shards, [list(range(count))], {"w": -100})
    assert float(total.sums[0][0]) == count * whole(float(shards[0][0]), exponent) * 2.0**exponent
    assert float(total.wire[2]) < 2.0**LIMIT_BITS


def test_an_overflow_of_one_shard_among_very_many_is_detected() -> None:
    shards = [torch.tensor([1.0])] * (EXACT_SHARDS - 1) + [torch.tensor([2.0**40])]
    assert not summed(shards, [list(range(EXACT_SHARDS))], {"w": -20}).read().settled
    one, exponent = settled(shards, [list(range(EXACT_SHARDS))], {"w": -20})
    assert abs(float(one.sums[0][0]) - (2.0**40 + EXACT_SHARDS - 1)) <= EXACT_SHARDS / 2 * 2.0**exponent


def test_values_that_shrank_too_far_get_a_finer_grid() -> None:
    shards = [torch.tensor([3e-9]), torch.tensor([1e-9])]
    assert not summed(shards, [[0, 1]], {"w": -45}).read().settled
    total, _ = settled(shards, [[0], [1]], {"w": -45})
    assert float(total.sums[0][0]) == pytest.approx(float(shards[0]) + float(shards[1]), rel=2**-40)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_tensors_are_named_and_never_summed(bad: float) -> None:
    one = ExactSum({"a": 2, "b": 1}, 2, CPU)
    one.begin({"a": -40, "b": -40})
    one.add([torch.tensor([1.0, bad]), torch.tensor([1.0])])
    assert not one.read().settled
    assert one.not_finite(one.largest()) == ["a"]


def test_zero_everywhere_is_settled_and_keeps_its_grid() -> None:
    one = ExactSum({"a": 2, "b": 1}, 2, CPU, riding=1)
    one.begin({"a": -40})
    one.add([torch.zeros(2), torch.zeros(1)])
    one.rider.fill_(5)
    assert (one.read().settled, one.read().scales) == (True, {"a": -40})
    assert one.wire.tolist() == [0, 0, 0, 0, 0, 5]
    assert one.scales_from(one.largest()) == {}


@given(st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=6), min_size=1))
def test_all_tensors_at_once_round_as_one_by_one(values: list[list[float]]) -> None:
    tensors = [torch.tensor(one, dtype=torch.float32) for one in values]
    sizes = {str(number): len(one) for number, one in enumerate(values)}
    # The last tensor has no grid yet.
    scales = {str(number): -30 + 7 * number for number in range(len(values) - 1)}
    one_by_one, at_once = (ExactSum(sizes, 2, torch.device("cpu")) for _ in range(2))
    for found in (one_by_one, at_once):
        found.begin(scales)
    for _ in range(2):
        one_by_one.add(tensors)
        at_once.add_rounded(tensors)
    assert one_by_one.total.numpy().tobytes() == at_once.total.numpy().tobytes()
