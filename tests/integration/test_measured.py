"""Metrics of steps and summaries of evaluations on a cluster: the same on any number of workers, through a loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_plus import Data, Evaluate, Parallel, Workers, resume
from raytrain_plus.audit.audit import audit
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", autouse=True)
def four() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def trained(tmp_path: Path, name: str, **changes: Any) -> Run:
    """Run 20 steps with exact sums, on the files of `write_files`, and check that it ends well."""
    settings: dict[str, Any] = {
        "task": "measured:Measured",
        "data": Data(path=str(tmp_path / "data"), batch_size=48, shards=8),
        "steps": 20,
        "reduction": "exact",
        "evaluate": Evaluate(path=str(tmp_path / "held"), every_steps=8),
    }
    run = Run(job(tmp_path, name=name, **{**settings, **changes}))
    result = run.finish()
    assert result.status == "finished", result.error
    assert audit(result.path).clean
    return run


def reported(run: Run) -> tuple[Any, ...]:
    """Return the metrics of each step and each evaluation, and the hash of the state."""
    steps = {event["step"]: event.get("metrics") for event in run.events("step_committed")}
    evaluations = {event["step"]: event["metrics"] for event in run.events("evaluated")}
    assert run.result is not None
    return list(steps.items()), list(evaluations.items()), run.result.state_sha256


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("alone")
    write_files(folder)
    return reported(trained(folder, "alone", workers=Workers(min=1, max=1)))


def write_files(folder: Path) -> None:
    write_data(folder / "data")
    write_data(folder / "held", rows=90, files=1, seed=3)


@pytest.mark.slow
def test_metrics_are_the_same_on_several_workers_and_through_a_loss(tmp_path: Path, alone: tuple[Any, ...]) -> None:
    write_files(tmp_path)
    steps, evaluations, state = alone
    assert [step for step, _ in steps] == list(range(20))
    assert all(set(metrics) == {"rows", "share", "undefined"} for _, metrics in steps)
    assert all(metrics["undefined"] == "nan" for _, metrics in steps)
    assert [(step, set(metrics)) for step, metrics in evaluations] == [(n, {"loss", "f1"}) for n in (-1, 7, 15, 19)]
    run = trained(tmp_path, "killed", workers=Workers(min=2, max=3), args={"fault": "applied:kill:9"})
    assert reported(run) == alone
    assert run.events("recovered")
    plain = trained(tmp_path, "plain", task="measured:Plain", workers=Workers(min=2, max=2))
    assert reported(plain) == ([(step, None) for step, _ in steps], evaluations, state)


@pytest.mark.slow
def test_stages_report_the_metrics_of_one_worker(tmp_path: Path, alone: tuple[Any, ...]) -> None:
    write_files(tmp_path)
    run = trained(tmp_path, "stages", workers=Workers(min=4, max=4), parallel=Parallel(pipeline=2))
    assert reported(run) == alone


@pytest.mark.slow
def test_a_resumed_run_reports_the_same_metrics(tmp_path: Path, alone: tuple[Any, ...]) -> None:
    write_files(tmp_path)
    run = trained(tmp_path, "short", workers=Workers(min=2, max=2), steps=7)
    result = resume(run.folder, ["steps=20"], roots=[TASKS])
    assert (result.status, result.state_sha256) == ("finished", alone[2])
    assert [(event["step"], event["metrics"]) for event in run.events("step_committed")] == alone[0]
