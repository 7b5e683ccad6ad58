"""Runs that end because they no longer improve: at one step, with one model, whatever is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import safetensors.torch
import torch

from raytrain_plus import Checkpoint, EarlyStop, Evaluate, Job, Parallel, Result, Workers, attach, run
from raytrain_plus.launch.cluster import controllers_of
from raytrain_plus.launch.runner import resume
from raytrain_plus.runs.export import Which, weights_of
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

BEST, END = 30, 50
"""The distance is 5 after 30 and after 40 steps, and larger after 50."""


def early(tmp_path: Path, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "task": "tasks:Peaks",
        "steps": 200,
        "reduction": "exact",
        "workers": Workers(min=1, max=2),
        "evaluate": Evaluate(path=str(write_data(tmp_path / "data")), every_steps=10),
        "early_stop": EarlyStop(metric="distance", patience=2),
        "checkpoint": Checkpoint(keep=1),
        "args": {"pad_s": 0.01},
    }
    return job(tmp_path, **{**settings, **changes})


def model(path: Path | str) -> bytes:
    return (Path(path) / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Run:
    """Return a run that ended early, undisturbed."""
    one = Run(early(tmp_path_factory.mktemp("calm"), workers=Workers(min=1)))
    one.finish()
    return one


def evaluations(one: Run) -> dict[int, dict[str, float]]:
    """Return the metrics of each evaluation, by step; check that each was reported once."""
    told = one.events("evaluated")
    found = {event["step"]: event["metrics"] for event in told}
    assert len(found) == len(told)
    return found


def check_as(calm: Run, one: Run) -> Result:
    """Check that a run decided as the undisturbed one, at the same step, with the same model; return its result."""
    expected, result = calm.finish(), one.finish()
    assert (result.status, result.error) == ("finished", None)
    assert (result.steps, result.stopped_early) == (expected.steps, expected.stopped_early)
    assert (result.state_sha256, result.model_step) == (expected.state_sha256, expected.model_step)
    assert (result.metrics, result.model_metrics) == (expected.metrics, expected.model_metrics)
    assert model(result.path) == model(expected.path)
    assert evaluations(one) == evaluations(calm)
    assert one.losses() == calm.losses()
    return result


def test_the_best_state_is_the_model_and_a_kill_changes_nothing(tmp_path: Path) -> None:
    calm = run(early(tmp_path, name="calm"), quiet=True, roots=[TASKS])
    assert (calm.status, calm.exit_code, calm.steps) == ("finished", 0, END)
    assert calm.stopped_early == f"distance has not improved since step {BEST}"
    assert (calm.metrics["distance"], calm.model_metrics["distance"]) == (15, 5)
    assert calm.model_step == BEST - 1
    folder = LocalFolder(Path(calm.path))
    manifest, best = weights_of(folder, Which(best=True))
    weights = best.values
    assert manifest.step == BEST - 1
    exported = safetensors.torch.load(model(calm.path))
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], value) for name, value in weights.items())
    newest, last = weights_of(folder, Which())
    assert newest.step == END - 1
    assert any(not torch.equal(exported[name], value) for name, value in last.values.items())

    again = run(early(tmp_path, name="calm"), quiet=True, roots=[TASKS])
    assert (again.trained_steps, again.stopped_early) == (0, calm.stopped_early)

    killed = Run(early(tmp_path, name="killed"))
    killed.until_size(2)
    killed.until_step(33)
    killed.kill(killed.members()[1])
    done = killed.finish()
    assert (done.status, done.steps, done.stopped_early) == ("finished", END, calm.stopped_early)
    assert done.recoveries == 1
    assert done.state_sha256 == calm.state_sha256
    assert model(done.path) == model(calm.path)


@pytest.mark.slow
def test_rescales_before_the_decision_change_nothing(tmp_path: Path, calm: Run) -> None:
    gates = (BEST + 3, BEST + 13)
    one = Run(early(tmp_path, task="tasks:Gated", args={"gates": gates}))
    one.until_size(2)
    handle = attach(one.folder)
    # The worker that leaves stays as a spare, so it can take its place back at once.
    for gate, sizes in zip(gates, ({"max": 1, "spares": 1}, {"max": 2, "spares": 0}), strict=True):
        one.until_step(gate - 1)
        handle.rescale(**sizes)
        (tmp_path / f"gate-{gate}").touch()
        one.until_size(sizes["max"])
    check_as(calm, one)
    assert [(event["from"], event["to"]) for event in one.events("rescaled")] == [(2, 1), (1, 2)]


@pytest.mark.slow
def test_stages_of_which_one_is_killed_decide_as_one_worker(tmp_path: Path, calm: Run) -> None:
    one = Run(early(tmp_path, workers=Workers(min=2), parallel=Parallel(pipeline=2, microbatches=1)))
    one.until_size(2)
    one.until_step(BEST + 3)
    one.kill(one.members()[0])
    assert check_as(calm, one).recoveries == 1
    assert {member["stage"] for member in one.members()} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_a_worker_that_dies_as_it_reads_the_best_state_at_the_end_changes_nothing(
    tmp_path: Path, calm: Run, stages: int
) -> None:
    parallel = Parallel(pipeline=stages, microbatches=1)
    # Nothing else in this run reads a state.
    one = Run(early(tmp_path, workers=Workers(min=stages), parallel=parallel, args={"fault": "adopt:kill"}))
    check_as(calm, one)
    assert [file.read_text() for file in tmp_path.glob("reached-*")] == ["adopt\n"]
    assert len(one.events("worker_lost")) == 1


@pytest.mark.slow
def test_a_resumed_run_decides_from_all_its_evaluations_and_more_patience_continues_it(tmp_path: Path) -> None:
    one = Run(early(tmp_path, args={"pad_s": 0.05}))
    one.until_step(41)
    for controller in controllers_of("run"):
        ray.get(controller.stop.remote(), timeout=10)
    stopped = one.finish()
    assert (stopped.status, stopped.stopped_early) == ("stopped", None)
    done = resume(stopped.path, quiet=True, roots=[TASKS])
    assert (done.status, done.steps) == ("finished", END)
    assert done.stopped_early == f"distance has not improved since step {BEST}"
    longer = resume(stopped.path, ["early_stop.patience=4"], quiet=True, roots=[TASKS])
    assert (longer.status, longer.steps, longer.stopped_early) == ("finished", END + 20, done.stopped_early)
    assert longer.state_sha256 == done.state_sha256
