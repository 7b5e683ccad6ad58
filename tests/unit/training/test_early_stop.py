"""A run ends early by its evaluations alone: the same decision whatever happened between them."""

import itertools
import math

import pytest

from raytrain_plus import EarlyStop, KeepBest
from raytrain_plus.training.exchange.early_stop import Evaluations, EvaluationVerdict, verdict


def decided(*values: float, patience: int = 2, mode: str = "min") -> EvaluationVerdict:
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
    assert decided(*values) == EvaluationVerdict(best, over)
    if not any(map(math.isnan, values)):
        assert decided(*(-value for value in values), mode="max") == EvaluationVerdict(best, over)


def test_patience_counts_evaluations() -> None:
    assert [decided(*[1.0] * 9, patience=patience).over for patience in (1, 3, 8, 9)] == [19, 39, 89, None]


def test_the_order_in_which_evaluations_arrive_does_not_matter() -> None:
    rule = EarlyStop(metric="m", patience=2)
    evaluated = {9: {"m": 2.0}, 19: {"m": 1.0}, 29: {"m": 3.0}, 39: {"m": 1.5}}
    for order in itertools.permutations(evaluated.items()):
        assert verdict(rule, dict(order)) == EvaluationVerdict(19, 39)


def test_neither_the_untrained_state_nor_a_missing_metric_is_an_improvement() -> None:
    rule = EarlyStop(metric="m", patience=2)
    assert verdict(rule, {-1: {"m": 0.0}, 9: {"m": 1.0}, 19: {"n": 0.0}, 29: {}}) == EvaluationVerdict(9, 29)


def test_a_worker_that_joins_later_decides_as_the_others() -> None:
    rule = EarlyStop(metric="m", patience=2)
    first = Evaluations(rule, {})
    first.reach(9, {"m": 1.0})
    assert (first.is_best(9), first.over) == (True, False)
    first.reach(10, {})
    assert not first.is_best(10)
    later = Evaluations(rule, {9: {"m": 1.0}})
    for one in (first, later):
        one.reach(19, {"m": 2.0})
        assert (one.is_best(19), one.over) == (False, False)
        one.reach(29, {"m": 2.0})
        assert one.over


def test_evaluations_of_steps_that_are_computed_again_count_when_the_state_reaches_them() -> None:
    known = {9: {"m": 2.0}, 19: {"m": 1.0}, 29: {"m": 3.0}, 39: {"m": 3.0}}
    again = Evaluations(EarlyStop(metric="m", patience=2), known)
    again.reach(14, {})
    assert (again.is_best(9), again.over, again.metrics(19)) == (True, False, {})
    for step in (19, 29, 38):
        again.reach(step, {})
        assert (again.is_best(19), again.over, again.metrics(19)) == (True, False, {"m": 1.0})
    again.reach(39, {})
    assert again.over


def test_the_best_state_is_known_without_patience_too() -> None:
    kept = Evaluations(KeepBest(metric="m", mode="max"), {9: {"m": 1.0}})
    for step in range(9, 99, 10):
        kept.reach(step, {"m": 1.0 + (step == 29)})
        assert (kept.is_best(step), kept.over) == (step in (9, 29), False)


def test_without_a_rule_nothing_ends() -> None:
    endless = Evaluations(None, {})
    for step in range(9):
        endless.reach(step, {"m": 1.0})
    assert not endless.over
    assert not endless.is_best(0)
