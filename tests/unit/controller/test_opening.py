"""What a run begins with: a process that calls the task only if the task hears of its run."""

from dataclasses import replace
from pathlib import Path

from raytrain_plus.controller.opening import callbacks_of
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.folders.local import LocalFolder
from tests.unit.controller.fakes import job_of, order_of


def test_only_a_task_that_hears_of_its_run_has_a_process(tmp_path: Path) -> None:
    order, run = order_of(job_of(), tmp_path / "run"), Claimed(LocalFolder(tmp_path / "run"))
    assert callbacks_of(order, run) is None
    callbacks = callbacks_of(replace(order, callbacks=("on_step",)), run)
    assert callbacks is not None
    called = callbacks._called
    assert (called.task, called.args) == (order.plan.job.task, order.plan.job.args)
    assert (called.facts.total_steps, called.facts.batch_size) == (order.plan.steps, order.plan.job.data.batch_size)
    assert (called.folder, called.checkpoints) == (str(tmp_path / "run"), str(tmp_path / "run" / "checkpoints"))
