"""The decision about a step whose sums are complete."""

from __future__ import annotations

import math
from math import inf, nan

import pytest

from raytrain_plus.training.exchange.verdict import (
    BUFFER,
    Fault,
    SumStatus,
    from_plain,
    gradient_norm,
    merged,
    of_step,
    squares_of,
    why_refused,
)


def test_the_norm_is_added_in_the_order_of_names_whatever_the_order_of_stages() -> None:
    squares = {f"layer{number}.weight": 10.0**-number / 3 for number in range(12)}
    backwards = dict(reversed(squares.items()))
    assert gradient_norm(squares) == gradient_norm(backwards) == pytest.approx(math.sqrt(sum(squares.values())))
    assert gradient_norm({}) == 0


@pytest.mark.parametrize("bad", [nan, inf])
def test_one_nonfinite_value_makes_the_step_unfit(bad: float) -> None:
    assert SumStatus(True, {"a": 1.0}).fit
    assert not SumStatus(True, {"a": 1.0, "b": bad}).fit
    assert not SumStatus(False, {}).fit
    assert not math.isfinite(gradient_norm({"a": 1.0, "b": bad}))


def test_the_knowledge_of_the_stages_is_merged() -> None:
    first = SumStatus(True, {"a": 1.0}, Fault(5, 0, "a"))
    last = SumStatus(True, {"b": nan}, Fault(2, 1, "b"))
    same_shard = SumStatus(True, {"c": 3.0}, Fault(2, 3, "c"))
    whole = merged([first, last, same_shard])
    assert (whole.settled, whole.squares.keys()) == (True, {"a", "b", "c"})
    # The first shard, and in it the chunk nearest to the loss, from which the fault spread backwards.
    assert whole.fault == Fault(2, 3, "c")
    assert merged([first, SumStatus(False)]).settled is False
    assert merged([SumStatus(True), SumStatus(True)]) == SumStatus(True)


def test_said_survives_the_round_trip_as_plain_values() -> None:
    for said in (SumStatus(False), SumStatus(True, {"a": 0.1, "b": inf}, Fault(3, 1, "b"))):
        assert from_plain(said.plain()) == said


def test_overlapping_steps_keep_separate_norms() -> None:
    both = of_step(3, {"a": 1.0}) | of_step(13, {"a": 2.0, "b/c": 3.0})
    assert squares_of(3, both) == {"a": 1.0}
    assert squares_of(13, both) == {"a": 2.0, "b/c": 3.0}


def test_a_step_is_refused_only_with_a_known_reason() -> None:
    unfit = SumStatus(True, {"a": 1.0, "b": nan})
    assert why_refused(7, (), SumStatus(True, {"a": 1.0}), searched=False) == ""
    assert why_refused(7, (), SumStatus(False), searched=True) == "", "exact sums that do not fit are computed again"
    assert why_refused(7, (), unfit, searched=False) == ""
    assert "loss of step 7 is not finite in shards 1, 2" in why_refused(7, (1, 2), unfit, searched=False)
    found = SumStatus(True, unfit.squares, Fault(4, 0, "b"))
    assert "gradient of step 7 is not finite in shard 4, first in the parameter 'b'" in why_refused(
        7, (), found, searched=True
    )


@pytest.mark.parametrize(
    ("squares", "words"),
    [
        ({"a": inf, "b": 1.0}, "in the parameter 'a', although it is finite in each shard"),
        ({"a": 1.7e308, "b": 1.7e308}, "in the parameter 'a', although it is finite in each shard"),
        ({"a": 1.0, f"{BUFFER}bn.running_var": nan}, "the buffer 'bn.running_var' would not be finite after step 7"),
        ({"a": nan, f"{BUFFER}bn.running_var": nan}, "in the parameter 'a'"),
    ],
)
def test_sums_of_finite_gradients_that_overflow_are_named(squares: dict[str, float], words: str) -> None:
    assert words in why_refused(7, (), SumStatus(True, squares), searched=True)
