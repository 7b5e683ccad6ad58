"""A checkpoint is read into the state that it belongs to, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import CheckpointError, DamagedError
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.state.holding import describe_state, listed_weights
from raytrain_plus.state.hostcopy import HostMemory
from raytrain_plus.state.named import state_sha256
from raytrain_plus.state.stages import everything, whole_tree
from raytrain_plus.state.stored.checkpoint import write_share
from raytrain_plus.state.stored.manifest import Manifest, name_of
from raytrain_plus.state.transfer import hashed, part_of, undigested, with_rows
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.shardable import divide
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from raytrain_plus.workers.messages import WHOLE
from raytrain_plus.workers.restored import restore
from tests.support.exact_steps import sha, state_of
from tests.support.states import described, shares
from tests.unit.training.group import context


def written(run: LocalFolder, without: str = "?", **changes: Any) -> Manifest:
    """Write a checkpoint of the state after no step, without the tensors of that module."""
    tensors, tree = describe_state(state_of().holding())
    kept = {name: value.clone() for name, value in tensors.items() if f"/{without}" not in name}
    found = shares(run, kept, name_of(3, 0), 2)
    return described(3, 0, found, tree={**tree, **changes})


def load(run: LocalFolder, manifest: Manifest, state: TrainState, owned: Pieces | None = None) -> None:
    plan = SimpleNamespace(fresh_rates=False)
    prepared: Any = SimpleNamespace(own=SimpleNamespace(part=lambda layers: state), run_folder=lambda: run, plan=plan)
    restore(prepared, manifest, WHOLE, owned)
    assert state.last_applied == manifest.step


def restored(run: LocalFolder, manifest: Manifest) -> str:
    state = state_of()
    load(run, manifest, state)
    return sha(state)


def test_a_whole_checkpoint_is_read(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    assert restored(run, written(run)) == sha(state_of())


def test_an_incomplete_one_of_an_older_version_is_damaged_so_the_one_before_is_used(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    with pytest.raises(DamagedError) as caught:
        restored(run, written(run, "last"))
    assert caught.value.what.startswith("it lacks 2 of ")
    assert "tensors of the task's model (last.bias, last.weight); or the model has changed" in caught.value.what


def test_one_that_lists_its_parameters_belongs_to_another_task(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    with pytest.raises(CheckpointError, match="the checkpoint belongs to another task: last"):
        restored(run, written(run, "last", weights={"first.weight": False}))


# Sharded states

CPU = torch.device("cpu")
BRACKETS = "w[3:7]"


class Pair(nn.Module):
    """A weight, and one that is named as rows of the first might be."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 3))
        self.register_parameter(BRACKETS, nn.Parameter(torch.randn(4, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w.T @ self.get_parameter(BRACKETS).T


class Paired(Task):
    """Trains both weights."""

    def model(self) -> nn.Module:
        return Pair()

    def optimizer(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=0.1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).float().square().mean()
        return loss


ALL = Pieces.of([Piece("w", 0, 8), Piece(BRACKETS, 0, 4)])
FRONT = Pieces.of([Piece("w", 0, 3), Piece("w", 7, 8), Piece(BRACKETS, 0, 1)])
MIDDLE = Pieces.of([Piece("w", 3, 7)])
OWNERS = {1: [ALL], 2: [FRONT, ALL - FRONT], 3: [FRONT, MIDDLE, ALL - FRONT - MIDDLE]}


def sharded(technique: Technique, task: Task | None = None) -> TrainState:
    task = task or Paired()
    built = build_model(task, 3, CPU)
    division = divide(task, list(built.module.named_parameters()))
    return TrainState(task, [built], Summing(1), seed=3, technique=technique, division=division)


def together(states: Sequence[TrainState]) -> str:
    """Return the hash of the state that these workers hold together."""
    parts = [undigested(2, state.holding(), everything) for state in states]
    return state_sha256(hashed(with_rows(parts, list(ALL))))


def saved(run: LocalFolder, states: Sequence[TrainState], owners: Sequence[Pieces]) -> Manifest:
    """Have each worker write its rows, each row and each number once."""
    written, trees = [], []
    writers = tuple(range(len(states)))
    for writer, state, owned in zip(writers, states, owners, strict=True):
        copies, tree = HostMemory().copy(state.holding(), writer, lambda layer: writers, owned)
        written.append(write_share(run, name_of(2, 0), writer, len(writers), copies))
        trees.append(tree)
    weights = {name: listed for state in states for name, listed in listed_weights(state.holding()).items()}
    manifest = described(2, 0, written, tree={**whole_tree(trees), "weights": weights})
    assert sum(file.bytes - file.head for file in manifest.files) == sum(one.bytes for one in manifest.tensors.values())
    assert len({name for tree in trees for name in tree["optimizer"]}) == sum(len(tree["optimizer"]) for tree in trees)
    return manifest


def trained_state(technique: Technique) -> TrainState:
    state, draw = sharded(technique), torch.Generator().manual_seed(0)
    steps = whole_steps(state)
    for step in range(3):
        steps.run(step, {0: [Microbatch(torch.randn(5, 3, generator=draw), 5)]}, context(SoloWorld()))
    return state


@pytest.mark.parametrize("after", OWNERS)
@pytest.mark.parametrize("before", OWNERS)
@pytest.mark.parametrize(
    "technique", [PLAIN, Technique(Precision("bf16-params", CPU), decay=0.9)], ids=["plain", "masters and averages"]
)
def test_a_weight_may_be_named_like_rows_of_another(
    tmp_path: Path, technique: Technique, before: int, after: int
) -> None:
    run, trained = LocalFolder(tmp_path), trained_state(technique)
    expected = together([trained])
    # Rows move to other workers, which write them.
    states = [sharded(technique) for _ in OWNERS[before]]
    for state, owned in zip(states, OWNERS[before], strict=True):
        state.own(owned)
        state.adopt(state.joined([trained.snapshot(rows=owned, with_values=True)]))
    assert together(states) == expected
    manifest = saved(run, states, OWNERS[before])
    states = [sharded(technique) for _ in OWNERS[after]]
    for state, owned in zip(states, OWNERS[after], strict=True):
        load(run, manifest, state, owned)
    assert together(states) == expected
    # So does a worker whose state is not sharded.
    whole = TrainState(Paired(), [build_model(Paired(), 3, CPU)], Summing(1), seed=3, technique=technique)
    load(run, manifest, whole)
    assert state_sha256(hashed(undigested(2, whole.holding(), everything))) == expected


def test_rows_are_taken_from_a_copy_of_the_whole_state() -> None:
    trained = trained_state(PLAIN)
    own, other = HostMemory(), HostMemory()
    copy = other.keep(own.snapshot(2, trained.holding()))
    assert state_sha256(hashed(copy)) == together([trained])
    states = [sharded(PLAIN) for _ in OWNERS[2]]
    for state, owned in zip(states, OWNERS[2], strict=True):
        state.own(owned)
        state.adopt(state.joined([part_of(copy, everything)]))
    assert together(states) == together([trained])


class Masked(Paired):
    """Has a weight that is infinite in part, as a mask may be."""

    def model(self) -> nn.Module:
        module = Pair()
        module.w.data[5, 0] = -torch.inf
        return module


def test_rows_may_hold_what_was_infinite_from_the_beginning(tmp_path: Path) -> None:
    technique = Technique(Precision("bf16-params", CPU), decay=0.9)
    states = [sharded(technique, Masked()) for _ in OWNERS[2]]
    manifest = saved(LocalFolder(tmp_path), states, OWNERS[2])
    for state, owned in zip(states, OWNERS[2], strict=True):
        load(LocalFolder(tmp_path), manifest, state, owned)
    assert states[0].allowed == {"param/w", "ema/w"}
