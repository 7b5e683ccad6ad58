"""A checkpoint is read into the state that it belongs to, or is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_plus.errors import CheckpointError, DamagedError
from raytrain_plus.state.holding import describe_state
from raytrain_plus.state.stored.manifest import Manifest, name_of
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.workers.messages import WHOLE
from raytrain_plus.workers.restored import restore
from tests.support.exact_steps import sha, state_of
from tests.support.states import described, shares


def written(run: LocalFolder, without: str = "?", **changes: Any) -> Manifest:
    """Write a checkpoint of the state after no step, without the tensors of that module."""
    tensors, tree = describe_state(state_of().holding())
    kept = {name: value.clone() for name, value in tensors.items() if f"/{without}" not in name}
    found = shares(run, kept, name_of(3, 0), 2)
    return described(3, 0, found, tree={**tree, **changes})


def restored(run: LocalFolder, manifest: Manifest) -> str:
    state = state_of()
    plan = SimpleNamespace(fresh_rates=False)
    prepared: Any = SimpleNamespace(own=SimpleNamespace(part=lambda layers: state), run_folder=lambda: run, plan=plan)
    restore(prepared, manifest, WHOLE)
    assert state.last_applied == 3
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
