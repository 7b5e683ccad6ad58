"""What a run begins with: its listeners call the task only if the task hears of its run."""

from dataclasses import replace
from pathlib import Path

from raytrain_plus.controller.opening import listened_of
from raytrain_plus.storage.folders.claimed import Claim, Claimed
from raytrain_plus.storage.folders.local import LocalFolder
from tests.unit.controller.fakes import job_of, order_of


def test_only_a_task_that_hears_of_its_run_is_called(tmp_path: Path) -> None:
    run = Claimed(LocalFolder(tmp_path / "run"), Claim("claims/1", b"ours"))
    order = replace(order_of(job_of(trackers=["mlflow"]), tmp_path / "run"), environment={"MLFLOW_X": "y"})
    told = listened_of(order, run)
    assert told.task is None
    assert (told.folder, told.claim, told.trackers) == (str(tmp_path / "run"), run.claim, ["mlflow"])
    assert (told.environment, told.roots) == ({"MLFLOW_X": "y"}, order.plan.roots)
    assert told.names == ["TensorBoard", "mlflow"]
    told = listened_of(replace(order, callbacks=("on_step",)), run)
    called = told.task
    assert called is not None
    assert (called.task, called.args) == (order.plan.job.task, order.plan.job.args)
    assert (called.total_steps, called.batch_size) == (order.plan.steps, order.plan.job.data.batch_size)
    assert called.checkpoints == str(tmp_path / "run" / "checkpoints")
    assert told.names == ["TensorBoard", "mlflow", "the task's callbacks"]
