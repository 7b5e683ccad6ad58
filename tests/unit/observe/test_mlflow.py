"""The MLflow tracker, with MLflow's own client on a file store."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.observe.trackers.event_metrics import MetricValue

SETTINGS = {"name": "digits", "args": {"rate?": 0.5, "deep": {"er": None}}, "trackers": ["mlflow"], "task": "a:B"}


@pytest.fixture(scope="module")
def module() -> Any:
    """Load the tracker, and MLflow with it, which takes seconds: only in a process that runs these tests."""
    with warnings.catch_warnings():
        # MLflow warns about other packages.
        warnings.simplefilter("ignore")
        from raytrain_plus.observe.trackers import mlflow
    return mlflow


@pytest.fixture
def client(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "trees")
    return module.MlflowClient()


def test_a_run_is_there_with_its_settings_figures_and_end(
    client: Any, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_PARAMS", 2)
    run, tracker = module.begin(None, "digits", SETTINGS)
    tracker.add([MetricValue("evaluation/acc@5", 0.5, step, step + 0.25) for step in range(1500)])
    tracker.end("stopped")
    found = client.get_run(run)
    assert client.get_experiment(found.info.experiment_id).name == "trees"
    assert (found.info.run_name, found.info.status) == ("digits", "KILLED")
    assert found.data.params == {
        "name": "digits",
        "args.rate_": "0.5",
        "args.deep.er": "null",
        "trackers": '["mlflow"]',
        "task": "a:B",
    }
    history = client.get_metric_history(run, "evaluation/acc_5")
    assert [(one.step, one.timestamp) for one in history] == [(step, 1000 * step + 250) for step in range(1500)]


def test_a_run_is_continued(client: Any, module: Any) -> None:
    run, _ = module.begin(None, "digits", SETTINGS)
    client.set_terminated(run, "KILLED")
    again, tracker = module.begin(run, "digits", {**SETTINGS, "name": "another"})
    assert (again, client.get_run(run).info.status) == (run, "RUNNING")
    tracker.end("failed")
    found = client.get_run(run)
    assert (found.info.status, found.data.params["name"]) == ("FAILED", "another")
    third, tracker = module.begin(run, "digits", SETTINGS)
    tracker.end("finished")
    found = client.get_run(run)
    # MLflow does not allow changing parameters.
    assert (third, found.info.status, found.data.params["name"]) == (run, "FINISHED", "another")


@pytest.mark.parametrize("removed", [True, False])
def test_a_removed_run_is_replaced_by_a_new_one(client: Any, module: Any, removed: bool) -> None:
    run, _ = module.begin(None, "digits", SETTINGS)
    if removed:
        client.delete_run(run)
    else:
        run = "0" * 32
    another, _ = module.begin(run, "digits", SETTINGS)
    assert another != run
    assert client.get_run(another).info.run_name == "digits"
