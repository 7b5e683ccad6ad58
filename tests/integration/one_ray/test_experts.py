"""`parallel.experts` on a real cluster: the bits of one worker, whoever hosts the experts, dies and resumes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from raytrain_plus import Checkpoint, Job, Parallel, Workers, attach
from tests.integration.elastic import Run, ended, job
from tests.integration.tasks import write_data
from tests.support.elastic_runs import exact

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]


def sparse(tmp_path: Path, name: str, **changes: Any) -> Job:
    """A job whose experts are divided into four slices, on one worker unless it says otherwise."""
    settings = {"task": "tasks:FaultyExperts", "workers": Workers(min=1), "parallel": Parallel(experts=4)}
    return exact(tmp_path, name, **{**settings, **changes})


def test_a_host_of_experts_dies_and_another_one_joins(tmp_path: Path) -> None:
    """Four hosts, of which one dies: two host two slices each until a fourth worker is there again."""
    write_data(tmp_path / "data", rows=517)
    expected = ended(Run(sparse(tmp_path, "one", steps=60)))
    workers = Workers(min=1, max=4, cpus=0.5)
    run = Run(sparse(tmp_path, "killed", workers=workers, steps=60, args={"pad_s": 0.02}))
    run.until_size(4)
    run.until_step(run.committed() + 4)
    run.kill(run.members()[1])
    run.until_told("recovered", 1)
    assert ended(run) == expected
    hosts = [[len(one["slices"]) for one in view["members"]] for view in run.events("view_formed")]
    assert [1, 1, 1, 1] in hosts
    assert hosts[hosts.index([1, 1, 1, 1]) + 1] in ([2, 2], [1, 1, 1, 1])
    assert hosts[-1] == [1, 1, 1, 1]
    assert {one["checkpoint"] for one in run.events("resumed")} <= {None}, "copies in memory, no checkpoints"


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(experts=2, sharded="optimizer"),
        pytest.param(Parallel(experts=2, pipeline=2, sharded="optimizer"), marks=pytest.mark.slow),
        pytest.param(Parallel(experts=4, pipeline=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_death_in_three_dimensions_changes_no_bit(tmp_path: Path, parallel: Parallel) -> None:
    write_data(tmp_path / "data", rows=517)
    expected = ended(Run(sparse(tmp_path, "one", steps=40, parallel=replace(parallel, sharded="none", pipeline=1))))
    size = 2 * parallel.width
    workers = Workers(min=1, max=size, cpus=0.25)
    run = Run(sparse(tmp_path, "killed", workers=workers, parallel=parallel, steps=40, args={"pad_s": 0.01}))
    run.until_size(size)
    run.until_step(run.committed() + 4)
    run.kill(run.members()[-1])
    run.until_told("recovered", 1)
    assert ended(run) == expected
    assert all(one["steps_lost"] == 0 for one in run.events("recovered"))


def test_a_ring_gives_the_same_to_rounding(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"reduction": "ring", "steps": 20}
    losses = []
    for name, workers in (("one", Workers(min=1)), ("four", Workers(min=4, cpus=0.5))):
        run = Run(sparse(tmp_path, name, workers=workers, **settings))
        assert run.finish().status == "finished"
        losses.append(run.losses())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_stopped_run_resumes_on_any_number_of_hosts_and_exports_whole_experts(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"steps": 60, "args": {"pad_s": 0.02}}
    expected = ended(Run(sparse(tmp_path, "one", **settings)))
    workers, saving = Workers(min=1, max=4, cpus=0.5), {"checkpoint": Checkpoint(every_steps=10)}
    run = Run(sparse(tmp_path, "stopped", workers=workers, **saving, **settings))
    run.until_size(4)
    run.until_step(25)
    attach(run.folder).stop()
    assert run.finish().status == "stopped"
    for size, cpus in ((1, 3.0), (2, 2.0), (4, 0.5)):
        again = replace(run.job, name=f"again-{size}", workers=Workers(min=size, max=4, cpus=cpus))
        shutil.copytree(run.folder, run.folder.parent / again.name)
        resumed = Run(again, fresh=False)
        assert ended(resumed)[0] == expected[0]
        exported = safetensors.torch.load_file(resumed.folder / "model.safetensors")
        assert exported["switch.networks.up"].shape == (8, 16, 64)
        assert exported["mixture.router.routed"].shape == (11,)


def test_a_run_without_slices_has_experts_too(tmp_path: Path) -> None:
    """Replicas of whole experts: the bias of each follows what all shards have chosen."""
    write_data(tmp_path / "data", rows=517)
    alone, both = (
        ended(
            Run(
                job(
                    tmp_path,
                    name=f"of-{size}",
                    task="tasks:FaultyExperts",
                    reduction="exact",
                    steps=20,
                    workers=Workers(min=size, cpus=0.5),
                )
            )
        )
        for size in (1, 3)
    )
    assert alone == both
