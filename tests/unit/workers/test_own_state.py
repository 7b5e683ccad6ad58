"""A worker that changes its stage loses nothing that nobody else may have, and never holds three models."""

from __future__ import annotations

import weakref

import pytest
import torch

from raytrain_plus.membership.mesh import Stage
from raytrain_plus.training.step import Stepper
from raytrain_plus.workers.messages import WHOLE, Layers
from raytrain_plus.workers.own_state import OwnState
from tests.unit.training.test_exact_steps import stepper

HALF = Layers(Stage(0, 2), (("first",),), {"first": 0, "last": 1})


def own(layers: Layers, held: int | None = 7) -> OwnState:
    made = OwnState(lambda layers: stepper())
    made.build(layers).last_applied = held
    return made


def test_it_holds_a_state_only_of_its_step_and_stage() -> None:
    state = own(WHOLE)
    assert state.at(7, WHOLE.stage) is state.stepper
    assert (state.at(6, WHOLE.stage), state.at(7, HALF.stage)) == (None, None)
    assert OwnState(lambda layers: stepper()).at(-1, WHOLE.stage) is None


def test_a_part_is_built_only_if_another_is_held() -> None:
    state = own(WHOLE)
    before = state.stepper
    assert state.part(WHOLE) is before
    assert state.part(HALF) is state.stepper is not before
    assert state.stage == HALF.stage


@pytest.mark.parametrize(
    ("before", "now", "held", "returns"),
    [
        # It had not taken the state yet, or only a part of it.
        (WHOLE, HALF, -1, True),
        (WHOLE, HALF, None, True),
        # It has less of the model than before.
        (WHOLE, HALF, 7, True),
        (HALF, WHOLE, 7, False),
        (HALF, WHOLE, 6, True),
        (HALF, Layers(Stage(1, 2), (("last",),), {}), 7, False),
    ],
)
def test_the_previous_state_returns_unless_what_was_taken_is_as_good(
    before: Layers, now: Layers, held: int | None, returns: bool
) -> None:
    state = own(before)
    first = state.stepper
    second = state.build(now, keep_before=True)
    second.last_applied = held
    state.go_back()
    assert state.stepper is (first if returns else second)
    assert state.stage == (before if returns else now).stage
    # That was settled once for all.
    state.build(now)
    state.go_back()
    assert state.stage == now.stage


def test_the_previous_state_returns_if_the_new_part_cannot_be_built() -> None:
    parts = iter([stepper()])
    state = OwnState(lambda layers: next(parts))
    first = state.build(WHOLE)
    with pytest.raises(StopIteration):
        state.build(HALF, keep_before=True)
    assert state.now is None
    state.go_back()
    assert (state.stepper, state.stage) == (first, WHOLE.stage)


def test_a_step_proves_that_the_previous_state_is_not_needed() -> None:
    state = own(WHOLE)
    second = state.build(HALF, keep_before=True)
    state.proven()
    state.go_back()
    assert state.stepper is second


def test_a_replaced_state_is_freed_before_the_next_is_built() -> None:
    living: list[weakref.ref[torch.nn.Module]] = []

    def build(layers: Layers) -> Stepper:
        assert [ref for ref in living if ref() is not None] == []
        made = stepper()
        living.append(weakref.ref(made.module))
        return made

    state = OwnState(build)
    state.build(WHOLE)
    state.build(HALF)
    state.part(WHOLE)
    assert len(living) == 3
