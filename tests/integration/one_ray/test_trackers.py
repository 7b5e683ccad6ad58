"""Trackers of real runs: MLflow's data at the end, even if the run was stopped in between."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_plus import Checkpoint, Data, Evaluate, InputError, Job, Workers, run
from raytrain_plus.launch.cluster import controllers_of
from raytrain_plus.launch.runner import resume
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Configure MLflow with a store of files, in the driver's environment alone, as a user does."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "trees")
    with warnings.catch_warnings():
        # Its warnings about other packages.
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient
    return MlflowClient()


def job(tmp_path: Path, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "name": "tracked",
        "task": "tasks:Sleeps",
        "data": Data(path=str(write_data(tmp_path / "data")), batch_size=48, shards=4),
        "steps": 400,
        "evaluate": Evaluate(path=str(tmp_path / "data"), every_steps=20),
        "checkpoint": Checkpoint(),
        "workers": Workers(min=2),
        "storage": str(tmp_path / "runs"),
        "trackers": ["mlflow"],
    }
    return Job(**{**settings, **changes})


def only_run(client: Any) -> Any:
    [experiment] = [one for one in client.search_experiments() if one.name == "trees"]
    [found] = client.search_runs([experiment.experiment_id])
    return found


def steps(client: Any, name: str) -> Sequence[int]:
    return [one.step for one in client.get_metric_history(only_run(client).info.run_id, name)]


@pytest.mark.slow
def test_one_run_of_mlflow_through_a_stop_and_a_new_length(tmp_path: Path, client: Any) -> None:
    one = Run(job(tmp_path))
    one.until_step(20)
    for controller in controllers_of("tracked"):
        ray.get(controller.stop.remote(), timeout=10)
    stopped = one.finish()
    assert stopped.status == "stopped"
    assert only_run(client).info.status == "KILLED"
    done = resume(stopped.path, [f"steps={stopped.steps + 15}"], quiet=True, roots=[TASKS])
    assert (done.status, done.steps) == ("finished", stopped.steps + 15)
    found = only_run(client)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "tracked")
    assert found.data.params["data.batch_size"] == "48"
    assert steps(client, "train/loss") == list(range(done.steps))
    events = list(read_events(LocalFolder(Path(done.path))))
    told = [event["loss"] for event in events if event["kind"] == "step_committed"]
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [one.value for one in history] == told
    assert found.data.metrics["evaluation/loss"] == done.metrics["loss"]
    assert set(found.data.metrics) >= {"run/workers", "train/samples_per_second"}


@pytest.mark.slow
def test_a_tracker_that_cannot_be_reached_costs_no_step(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hunter2"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", secret)
    done = run(job(tmp_path, steps=20, task="tasks:Net"), quiet=True, roots=[TASKS])
    assert (done.status, done.steps) == ("finished", 20)
    for file in Path(done.path).rglob("*"):
        assert file.is_dir() or secret.encode() not in file.read_bytes()


def test_what_is_not_installed_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(tmp_path)
    monkeypatch.setattr("raytrain_plus.observe.trackers.trackers.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'raytrain-plus\[mlflow\]'"):
        run(wanted, quiet=True, roots=[TASKS])
    assert not (tmp_path / "runs" / "tracked").exists()
