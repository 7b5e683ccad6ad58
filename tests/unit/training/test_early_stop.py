"""A run ends early by its evaluations alone: the same decision whatever happened between them."""

import itertools
import math

import pytest

from raytrain_plus import EarlyStop
from raytrain_plus.training.early_stop import Stopping, Verdict, verdict


def decided(*values: float, patience: int = 2, mode: str = "min") -> Verdict:
    rule = EarlyStop(metric="m", patience=patience, mode=mode)  # type: ignore[arg-type]
    return verdict(rule, {10 * number + 9: {"m": value} for number, value in enumerate(values)})


@pytest.mark.parametrize(
    ("values", "best", "over"),
    [
        ((), None, None),
        ((1.0,), 9, None),
        ((1.0, 2.0), 9, None),
        ((1.0, 2.0, 3.0), 9, 29),
        ((1.0, 2.0, 0.5, 0.6), 29, None),
        ((1.0, 1.0, 1.0), 9, 29),
        ((1.0, math.nan, math.inf), 9, 29),
        ((math.nan, math.nan), None, 19),
        # What follows the end does not count.
        ((1.0, 2.0, 3.0, 0.1), 9, 29),
    ],
)
def test_the_verdict(values: tuple[float, ...], best: int | None, over: int | None) -> None:
    assert decided(*values) == Verdict(best, over)
    if not any(map(math.isnan, values)):
        assert decided(*(-value for value in values), mode="max") == Verdict(best, over)


def test_patience_counts_evaluations() -> None:
    assert [decided(*[1.0] * 9, patience=patience).over for patience in (1, 3, 8, 9)] == [19, 39, 89, None]


def test_the_order_in_which_evaluations_arrive_does_not_matter() -> None:
    rule = EarlyStop(metric="m", patience=2)
    evaluated = {9: {"m": 2.0}, 19: {"m": 1.0}, 29: {"m": 3.0}, 39: {"m": 1.5}}
    for order in itertools.permutations(evaluated.items()):
        assert verdict(rule, dict(order)) == Verdict(19, 39)


def test_neither_the_untrained_state_nor_a_missing_metric_is_an_improvement() -> None:
    rule = EarlyStop(metric="m", patience=2)
    assert verdict(rule, {-1: {"m": 0.0}, 9: {"m": 1.0}, 19: {"n": 0.0}, 29: {}}) == Verdict(9, 29)


def test_a_worker_that_joins_later_decides_as_the_others() -> None:
    rule = EarlyStop(metric="m", patience=2)
    first = Stopping(rule, {})
    first.add(9, {"m": 1.0})
    assert (first.keeps(9), first.over) == (True, False)
    first.add(10, {})
    assert not first.keeps(10)
    later = Stopping(rule, {9: {"m": 1.0}})
    for one in (first, later):
        one.add(19, {"m": 2.0})
        assert (one.keeps(19), one.over) == (False, False)
        one.add(29, {"m": 2.0})
        assert one.over
    assert Stopping(rule, {9: {"m": 1.0}, 19: {"m": 2.0}, 29: {"m": 2.0}}).over


def test_without_a_rule_nothing_ends() -> None:
    endless = Stopping(None, {})
    for step in range(9):
        endless.add(step, {"m": 1.0})
    assert not endless.over
    assert not endless.keeps(0)
