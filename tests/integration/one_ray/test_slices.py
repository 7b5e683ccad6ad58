"""`parallel.tensor` on a real cluster: the bits of one worker, whoever hosts the slices, dies and resumes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from raytrain_plus import Checkpoint, Ema, Job, Parallel, Workers, attach
from tests.integration.elastic import Run, ended
from tests.integration.tasks import write_data
from tests.support.elastic_runs import exact

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

CUBE = Parallel(tensor=2, pipeline=2, sharded="optimizer")


def sliced(tmp_path: Path, name: str, **changes: Any) -> Job:
    """A job whose layers are cut into two slices, on one worker unless it says otherwise."""
    settings = {"task": "tasks:FaultySlices", "workers": Workers(min=1), "parallel": Parallel(tensor=2)}
    return exact(tmp_path, name, **{**settings, **changes})


@pytest.mark.parametrize(
    "parallel", [CUBE, pytest.param(replace(CUBE, sharded="none"), marks=pytest.mark.slow)], ids=str
)
def test_a_death_in_three_dimensions_changes_no_bit(tmp_path: Path, parallel: Parallel) -> None:
    """Two replicas of two stages of two workers become one, and the only replica then loses a worker, too."""
    write_data(tmp_path / "data", rows=517)
    expected = ended(Run(sliced(tmp_path, "one", steps=40)))
    workers = Workers(min=1, max=8, cpus=0.25)
    run = Run(sliced(tmp_path, "killed", workers=workers, parallel=parallel, steps=40, args={"pad_s": 0.01}))
    for number, place in enumerate(((1, 0, 1), (0, 1, 0))):
        if not number:
            run.until_size(8)
        run.until_step(run.committed() + 4)
        views = run.events("view_formed")
        seated = {(one["replica"], one["stage"], one["tensor_rank"]): one["worker"] for one in views[-1]["members"]}
        run.kill(next(one for one in run.members() if one["worker"] == seated[place]))
        run.until_told("recovered", number + 1)
    assert ended(run) == expected
    assert run.events("resumed") == []
    assert all(one["steps_lost"] == 0 for one in run.events("recovered"))
    first = {(one["stage"], one["tensor_rank"]): one["slices"] for one in run.events("view_formed")[0]["members"]}
    assert first == {(0, 0): [0], (0, 1): [1], (1, 0): [0], (1, 1): [1]}


@pytest.mark.slow
def test_slices_move_to_fewer_workers_and_back(tmp_path: Path) -> None:
    """The only replica loses one of two workers; the other one goes on with all slices, until a worker joins."""
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"steps": 40, "precision": "bf16-params", "ema": Ema(decay=0.9)}
    expected = ended(Run(sliced(tmp_path, "one", **settings)))
    run = Run(sliced(tmp_path, "alone", workers=Workers(min=1, max=2, cpus=2), args={"pad_s": 0.01}, **settings))
    run.until_size(2)
    run.until_step(run.committed() + 4)
    run.kill(run.members()[0])
    run.until_told("recovered", 1)
    assert ended(run) == expected
    shapes = [[one["slices"] for one in view["members"]] for view in run.events("view_formed")]
    assert shapes[:2] == [[[0], [1]], [[0, 1]]]
    assert {resumed["checkpoint"] for resumed in run.events("resumed")} <= {None}, "copies in memory, no checkpoints"
    exported = safetensors.torch.load_file(run.folder / "model.safetensors")
    assert exported["mlp.up.weight"].shape == (256, 16)
    assert exported["mlp.down.weight"].shape == (16, 256)


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("parallel", [Parallel(tensor=4), Parallel(tensor=2, pipeline=2)], ids=str)
def test_a_stopped_run_resumes_on_any_number_of_hosts(tmp_path: Path, parallel: Parallel) -> None:
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"steps": 60, "args": {"pad_s": 0.02}, "parallel": parallel}
    one = replace(parallel, pipeline=1)
    expected = ended(Run(sliced(tmp_path, "one", **{**settings, "parallel": one})))
    workers, saving = Workers(min=1, max=4, cpus=0.5), {"checkpoint": Checkpoint(every_steps=10)}
    run = Run(sliced(tmp_path, "stopped", workers=workers, **saving, **settings))
    run.until_size(4)
    run.until_step(25)
    attach(run.folder).stop()
    assert run.finish().status == "stopped"
    # As many as the cluster has room for.
    for size, cpus in ((1, 3.0), (2, 2.0), (4, 0.5)):
        again = replace(run.job, name=f"again-{size}", workers=Workers(min=size, max=4, cpus=cpus))
        shutil.copytree(run.folder, run.folder.parent / again.name)
        assert ended(resumed := Run(again, fresh=False))[0] == expected[0]
        assert {len(view["members"]) for view in resumed.events("view_formed")[-1:]} == {size}
