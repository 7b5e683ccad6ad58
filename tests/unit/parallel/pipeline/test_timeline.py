"""Orders laid out in time: the bubble of theory, the activations held, and no deadlock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.parallel.pipeline.timeline import (
    Action,
    Cost,
    bubble,
    gpipe,
    makespan,
    most_open_passes,
    one_forward_one_backward,
    simulate,
)

EACH = Cost(1.0, 1.0, 1.0)


@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (2, 8), (2, 16), (4, 16), (4, 4)])
def test_the_bubble_is_that_of_theory(make: object, stages: int, microbatches: int) -> None:
    bars = simulate(make(stages, microbatches), [EACH] * stages)  # type: ignore[operator]
    assert bubble(bars, stages) == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert makespan(bars) == pytest.approx(3.0 * (microbatches + stages - 1))


@given(stages=st.integers(1, 6), microbatches=st.integers(1, 12))
def test_activations_held(stages: int, microbatches: int) -> None:
    assert [most_open_passes(order) for order in gpipe(stages, microbatches)] == [microbatches] * stages
    few = [most_open_passes(order) for order in one_forward_one_backward(stages, microbatches)]
    assert few == [min(microbatches, stages - stage) for stage in range(stages)]


@given(
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 8),
    costs=st.lists(st.tuples(*[st.floats(0.01, 10)] * 3), min_size=5, max_size=5),
    transfer=st.floats(0, 2),
    make=st.sampled_from([gpipe, one_forward_one_backward]),
)
def test_no_stage_does_two_things_at_once_and_nothing_before_what_it_needs(
    stages: int, microbatches: int, costs: list[tuple[float, float, float]], transfer: float, make: object
) -> None:
    bars = simulate(make(stages, microbatches), [Cost(*cost) for cost in costs], transfer)  # type: ignore[operator]
    assert len(bars) == 2 * stages * microbatches
    ends = {bar.action: bar.end for bar in bars}
    for stage in range(stages):
        mine = sorted((bar for bar in bars if bar.stage == stage), key=lambda bar: bar.start)
        assert all(before.end <= after.start for before, after in itertools.pairwise(mine))
    for bar in bars:
        kind, chunk, number = bar.action.kind, bar.action.chunk, bar.action.microbatch
        if kind == "F" and chunk:
            assert bar.start >= ends[Action("F", chunk - 1, number)] + transfer
        if kind == "B":
            assert bar.start >= ends[Action("F", chunk, number)]
            if chunk < stages - 1:
                assert bar.start >= ends[Action("B", chunk + 1, number)] + transfer


def test_a_split_backward_sends_the_input_gradient_first() -> None:
    first = [Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)]
    second = [Action("F", 1, 0), Action("I", 1, 0), Action("W", 1, 0)]
    bars = simulate([first, second], [EACH, EACH])
    assert {(bar.action.kind, bar.stage): bar.start for bar in bars} == {
        ("F", 0): 0.0,
        ("F", 1): 1.0,
        ("I", 1): 2.0,
        ("I", 0): 3.0,
        ("W", 1): 3.0,
        ("W", 0): 4.0,
    }
    assert most_open_passes(first) == 1


def test_deadlocking_orders_are_rejected() -> None:
    first = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    second = [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)]
    with pytest.raises(ValueError, match="the schedule deadlocks"):
        simulate([first, second], [EACH, EACH])
