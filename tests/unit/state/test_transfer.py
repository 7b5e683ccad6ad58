"""A transferred state arrives complete and unchanged, or is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_plus.errors import TaskError
from raytrain_plus.state.holding import class_differences, describe_state
from raytrain_plus.state.transfer import load_snapshot, snapshot_digest, take_snapshot, unpacked
from tests.support.optimizers import OPTIMIZERS, Holder


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["adamw", "sgd", "adagrad", "nadam"])
@pytest.mark.parametrize("receiver_steps", [0, 2])
def test_the_copy_continues_as_the_original_does(
    make: Callable[[Any], torch.optim.Optimizer], receiver_steps: int
) -> None:
    donor, receiver = Holder(make, seed=1), Holder(make, seed=2)
    for _ in range(3):
        donor.step()
    for _ in range(receiver_steps):
        receiver.step()
    snapshot = pickle.loads(pickle.dumps(take_snapshot(2, donor.holding()), protocol=5))
    assert snapshot_digest(snapshot.step, snapshot.tensors, snapshot.values) == snapshot.digest
    load_snapshot(snapshot, receiver.holding())
    for _ in range(2):
        assert receiver.sha() == donor.sha()
        assert receiver.scales == donor.scales
        assert receiver.optimizer.param_groups[0]["lr"] == donor.optimizer.param_groups[0]["lr"]
        assert torch.equal(receiver.model.hidden, donor.model.hidden)
        assert torch.equal(receiver.model[2].bias, donor.model[2].bias)
        donor.step()
        receiver.step()


def test_damage_is_seen() -> None:
    snapshot = take_snapshot(0, Holder(OPTIMIZERS[0], seed=1).holding())
    name = next(iter(snapshot.tensors))
    dtype, shape, data = snapshot.tensors[name]
    other = data.copy()
    other[-1] ^= 1
    damaged = [
        (0, {**snapshot.tensors, name: (dtype, shape, other)}, snapshot.values),
        (0, {**snapshot.tensors, name: ("int32", shape, data)}, snapshot.values),
        (0, snapshot.tensors, snapshot.values[:-1] + b"?"),
        (1, snapshot.tensors, snapshot.values),
    ]
    assert snapshot_digest(0, snapshot.tensors, snapshot.values) == snapshot.digest
    assert all(snapshot_digest(*parts) != snapshot.digest for parts in damaged)


def test_another_models_state_is_refused_before_anything_changes() -> None:
    donor, receiver = Holder(OPTIMIZERS[0], seed=1), Holder(OPTIMIZERS[0], seed=2, width=6)
    before = receiver.sha()
    with pytest.raises(TaskError, match="another model"):
        load_snapshot(take_snapshot(0, donor.holding()), receiver.holding())
    assert receiver.sha() == before


@pytest.mark.parametrize("other", OPTIMIZERS[1:], ids=["sgd", "adagrad", "nadam"])
def test_another_optimizers_state_is_refused_before_anything_changes(
    other: Callable[[Any], torch.optim.Optimizer],
) -> None:
    donor, receiver = Holder(OPTIMIZERS[0], seed=1), Holder(other, seed=2)
    donor.step()
    receiver.step()
    before, group = receiver.sha(), dict(receiver.optimizer.param_groups[0])
    with pytest.raises(TaskError, match=r"the optimizer is AdamW in the checkpoint, \w+ in the task"):
        load_snapshot(take_snapshot(0, donor.holding()), receiver.holding())
    assert (receiver.sha(), dict(receiver.optimizer.param_groups[0])) == (before, group)


def test_another_or_a_missing_scheduler_is_reported() -> None:
    donor, receiver = Holder(OPTIMIZERS[0], seed=1), Holder(OPTIMIZERS[0], seed=2)
    _, tree = describe_state(donor.holding())
    tree = json.loads(json.dumps(tree))
    assert class_differences(tree, receiver.holding()) == []
    receiver.scheduler = torch.optim.lr_scheduler.StepLR(receiver.optimizer, 3)
    told = "the scheduler is CosineAnnealingLR in the checkpoint, StepLR in the task"
    assert class_differences(tree, receiver.holding()) == [told]
    receiver.scheduler = None
    assert class_differences(tree, receiver.holding()) == [told.replace("StepLR", "none")]
    # States of older versions do not have this key.
    del tree["classes"]
    assert class_differences(tree, receiver.holding()) == []


def test_owned_bytes_become_the_tensor_and_shared_ones_are_copied() -> None:
    mine = np.arange(8, dtype=np.float32).view(np.uint8).copy()
    whole = unpacked(("float32", (2, 4), mine), torch.device("cpu"))
    assert whole.data_ptr() == mine.ctypes.data
    assert torch.equal(whole, torch.arange(8.0).reshape(2, 4))
    foreign = mine[:]
    assert unpacked(("float32", (8,), foreign), torch.device("cpu")).data_ptr() != mine.ctypes.data
    mine.setflags(write=False)
    assert unpacked(("float32", (8,), mine), torch.device("cpu")).data_ptr() != mine.ctypes.data
    assert unpacked(("float32", (0, 3), np.empty(0, np.uint8)), torch.device("cpu")).shape == (0, 3)


def test_received_memory_is_neither_kept_nor_written_to() -> None:
    donor, receiver = Holder(OPTIMIZERS[0], seed=1), Holder(OPTIMIZERS[0], seed=2)
    donor.step()
    snapshot = pickle.loads(pickle.dumps(take_snapshot(0, donor.holding()), protocol=5))
    for _, _, data in snapshot.tensors.values():
        data.setflags(write=False)
    load_snapshot(snapshot, receiver.holding())
    receiver.step()
    assert snapshot_digest(snapshot.step, snapshot.tensors, snapshot.values) == snapshot.digest
