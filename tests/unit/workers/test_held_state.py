"""A worker that changes its stage loses nothing that nobody else may have, and never holds three models."""

from __future__ import annotations

import weakref

import pytest
import torch

from raytrain_plus.membership.mesh import Stage
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.shardable import Division
from raytrain_plus.workers.messages import WHOLE, Layers
from raytrain_plus.workers.states.held_state import OwnState
from tests.support.exact_steps import state_of

HALF = Layers(Stage(0, 2), (("first",),), {"first": 0, "last": 1})


def own(layers: Layers, held: int | None = 7) -> OwnState:
    made = OwnState(lambda layers: state_of())
    made.build(layers).last_applied = held
    return made


def test_it_holds_a_state_only_of_its_step_and_stage() -> None:
    mine = own(WHOLE)
    assert mine.at(7, WHOLE.stage) is mine.state
    assert (mine.at(6, WHOLE.stage), mine.at(7, HALF.stage)) == (None, None)
    assert OwnState(lambda layers: state_of()).at(-1, WHOLE.stage) is None


def test_a_part_is_built_only_if_another_is_held() -> None:
    mine = own(WHOLE)
    before = mine.state
    assert mine.part(WHOLE) is before
    assert mine.part(HALF) is mine.state is not before
    assert mine.stage == HALF.stage


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
    mine = own(before)
    first = mine.state
    second = mine.build(now, keep_before=True)
    second.last_applied = held
    mine.go_back()
    assert mine.state is (first if returns else second)
    assert mine.stage == (before if returns else now).stage
    # That was settled once for all.
    mine.build(now)
    mine.go_back()
    assert mine.stage == now.stage


def test_the_previous_state_returns_if_the_new_part_cannot_be_built() -> None:
    parts = iter([state_of()])
    mine = OwnState(lambda layers: next(parts))
    first = mine.build(WHOLE)
    with pytest.raises(StopIteration):
        mine.build(HALF, keep_before=True)
    assert mine.now is None
    mine.go_back()
    assert (mine.state, mine.stage) == (first, WHOLE.stage)


def test_a_step_proves_that_the_previous_state_is_not_needed() -> None:
    mine = own(WHOLE)
    second = mine.build(HALF, keep_before=True)
    mine.proven()
    mine.go_back()
    assert mine.state is second


def test_a_replaced_state_is_freed_before_the_next_is_built() -> None:
    living: list[weakref.ref[torch.nn.Module]] = []

    def build(layers: Layers) -> TrainState:
        assert [ref for ref in living if ref() is not None] == []
        made = state_of()
        living.append(weakref.ref(made.module))
        return made

    mine = OwnState(build)
    mine.build(WHOLE)
    mine.build(HALF)
    mine.part(WHOLE)
    assert len(living) == 3


def test_the_rows_of_a_sharded_state_return_even_if_more_was_taken() -> None:
    """Others may still have to take them; what was taken, others have."""
    mine = own(HALF)
    first = mine.state
    second = mine.build(WHOLE, keep_before=True)
    second.last_applied, second.division = 7, Division(frozenset(), {})
    mine.go_back()
    assert mine.state is first
