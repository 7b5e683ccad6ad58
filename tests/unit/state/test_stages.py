"""Dividing a state into stages and merging them returns the state of the whole model."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from raytrain_plus.errors import TaskError
from raytrain_plus.state import stages
from raytrain_plus.state.holding import class_differences, describe_state
from raytrain_plus.state.named import state_sha256
from raytrain_plus.state.stages import all_but, own_tensors, own_tree, whole_tree
from raytrain_plus.state.transfer import Snapshot, hashed, load_snapshot, restricted, take_snapshot
from tests.support.optimizers import OPTIMIZERS, Holder

LAYERS = {"0", "1", "2", "hidden"}


def part(snapshot: Snapshot, own: set[str]) -> Snapshot:
    """Return the state that a worker of these layers sends, including the values of no layer."""
    tree = own_tree(json.loads(snapshot.values), all_but(LAYERS - own))
    tensors = own_tensors(snapshot.tensors, all_but(LAYERS - own))
    return Snapshot(snapshot.step, tensors, json.dumps(tree).encode(), "")


def trained(seed: int, steps: int) -> Holder:
    made = Holder(OPTIMIZERS[0], seed)
    for _ in range(steps):
        made.step()
    return made


def test_the_examples_hold() -> None:
    assert doctest.testmod(stages).failed == 0


def test_the_stages_of_one_partition_make_the_whole() -> None:
    one, other = trained(1, 3), trained(2, 1)
    snapshot = take_snapshot(2, one.holding())
    halves = [part(snapshot, {"0", "hidden"}), part(snapshot, {"1", "2"})]
    assert halves[0].tensors.keys() | halves[1].tensors.keys() == snapshot.tensors.keys()
    assert not {name for name in halves[0].tensors if name.startswith(("param/1", "optim/2"))}
    load_snapshot(restricted(halves, ()), other.holding())
    assert other.sha() == one.sha()
    # The two serialize equally, except for the order in which they were built.
    assert (
        describe_state(other.holding())[1]["optimizer"].keys() == describe_state(one.holding())[1]["optimizer"].keys()
    )


def test_another_partition_takes_its_own_layers_from_all_stages() -> None:
    snapshot = take_snapshot(2, trained(1, 3).holding())
    halves = [part(snapshot, {"0", "hidden"}), part(snapshot, {"1", "2"})]
    for own in ({"0", "1"}, {"2", "hidden"}):
        cut = restricted(halves, LAYERS - own)
        expected = part(snapshot, own)
        assert cut.tensors.keys() == expected.tensors.keys()
        assert json.loads(cut.values) == json.loads(expected.values)


def test_the_hash_of_the_parts_is_the_hash_of_the_whole() -> None:
    one = trained(1, 3)
    holding = one.holding()
    snapshot = take_snapshot(2, holding)
    tree = json.loads(snapshot.values) | {"persistent": [name for name in holding.buffers if name != "hidden"]}
    snapshot = Snapshot(2, snapshot.tensors, json.dumps(tree).encode(), "")
    state: dict[str, torch.Tensor] = {}
    for own in ({"0", "2"}, {"1", "hidden"}):
        state |= hashed(part(snapshot, own))
    assert state_sha256(state) == one.sha()


def test_stages_whose_optimizers_have_other_groups_are_refused() -> None:
    def tree(groups: int) -> dict[str, Any]:
        return {"optimizer": {}, "groups": [{"parameters": []}] * groups, "scales": {}, "persistent": []}

    with pytest.raises(TaskError, match=r"1 parameter groups on one stage, 2 on another(.|\n)*some may be empty"):
        whole_tree([tree(2), tree(1)])


def test_values_of_no_layer_come_from_a_stage_that_trains() -> None:
    one, other = trained(1, 3), trained(2, 1)
    snapshot = take_snapshot(2, one.holding())
    frozen = Holder(OPTIMIZERS[0], 3)
    for _, value in frozen.named:
        value.requires_grad_(False)
    bare = replace(frozen.holding(), parameters=[], optimizer=None, scheduler=None, buffers={}, frozen=[])
    nothing = take_snapshot(2, bare)
    assert not nothing.tensors
    # It is the first stage, but the learning rate comes from the others.
    load_snapshot(restricted([nothing, snapshot], ()), other.holding())
    assert other.sha() == one.sha()
    assert other.optimizer.param_groups[0]["lr"] == one.optimizer.param_groups[0]["lr"] > 0
    # It takes none of these values, from one stage's state or all, whatever the optimizer's class.
    load_snapshot(restricted([nothing, snapshot], LAYERS), bare)
    load_snapshot(nothing, bare)
    assert class_differences(json.loads(snapshot.values), bare) == []
