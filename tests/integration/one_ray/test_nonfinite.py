"""Gradients that are not finite, on real workers: never applied, never saved, never called right."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from raytrain_plus import Checkpoint, Elastic, Workers
from raytrain_plus.audit.audit import audit
from raytrain_plus.membership.pieces import Piece
from raytrain_plus.runs.history import load_history
from raytrain_plus.state.stored.checkpoint import Copy, commit, read_tensors, write_share
from raytrain_plus.state.stored.manifest import Manifest, join_shares, name_of
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data

pytestmark = pytest.mark.usefixtures("cluster")


def newest(folder: Path) -> Manifest:
    return next(found.manifest for found in load_history(LocalFolder(folder)).found if found.manifest is not None)


def spoil(folder: Path) -> Manifest:
    """Write a checkpoint full of NaN that is the newest and otherwise complete, as older versions did."""
    run, good = LocalFolder(folder), newest(folder)
    name = name_of(good.step + 1, good.generation)
    copies = []
    for tensor, (dtype, shape, data) in read_tensors(run, good, dict.fromkeys(good.tensors)).items():
        if tensor.startswith("param/"):
            data.view("float32")[:] = math.nan
        copies.append(Copy(Piece(tensor, 0, shape[0] if shape else 1), dtype, shape, data))
    files, tensors = join_shares([write_share(run, name, 0, 1, copies)])
    bad = replace(good, step=good.step + 1, files=files, tensors=tensors)
    commit(run, bad)
    return bad


@pytest.mark.slow
def test_the_last_step_is_not_finite_and_an_older_version_saved_such_a_state(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    made = job(
        tmp_path,
        task="tasks:Derails",
        args={"after": 29},
        steps=30,
        clip_norm=None,
        workers=Workers(min=2),
        checkpoint=Checkpoint(every_steps=10),
    )
    expected = "the gradient of step 29 is not finite in shard 0, first in the parameter 'last.1.weight'"
    first = Run(made)
    result = first.finish()
    assert (result.status, result.exit_code, result.steps) == ("failed", 1, 29)
    assert result.error is not None
    assert expected in result.error
    # A failed run saves the state of its last committed step.
    model = safetensors.torch.load_file(first.folder / "model.safetensors")
    assert all(bool(value.isfinite().all()) for value in model.values())
    committed = first.events("step_committed")
    assert all(float(event["grad_norm"]) > 0 for event in committed)
    assert len(committed) == 29

    good = newest(first.folder)
    bad = spoil(first.folder)
    again = Run(made, fresh=False)
    assert expected in str(again.finish().error)
    [resumed] = again.events("resumed")
    assert (resumed["step"], resumed["checkpoint"]) == (28, good.name)
    [passed_over] = [event for event in again.events("checkpoint_failed") if event["step"] == bad.step]
    assert "holds NaN or infinity; the previous checkpoint is used" in passed_over["error"]


@pytest.mark.slow
def test_steps_that_are_skipped_are_the_same_ones_after_a_kill(tmp_path: Path) -> None:
    write_data(tmp_path / "data")

    def trained(name: str, **args: Any) -> Run:
        made = job(
            tmp_path,
            name=name,
            task="tasks:Derails",
            args={"above": 4.4, **args},
            steps=60,
            reduction="exact",
            workers=Workers(min=1, max=2),
            elastic=Elastic(wait_s=30, on_nonfinite="skip"),
        )
        run = Run(made)
        assert run.finish().status == "finished"
        return run

    calm, disturbed = trained("calm"), trained("disturbed", fault="loss:kill:90")
    assert calm.result is not None
    assert disturbed.result is not None
    skipped = [event["step"] for event in calm.events("step_committed") if event.get("skipped")]
    assert 0 < len(skipped) == calm.result.skipped < 30
    assert disturbed.result.recoveries == 1
    assert [event["step"] for event in disturbed.events("step_committed") if event.get("skipped")] == skipped
    assert disturbed.result.state_sha256 == calm.result.state_sha256
    # Their rows count as used.
    assert audit(disturbed.folder).clean
