"""Check what a job's task says of the weights of its model, before any worker builds it."""

from __future__ import annotations

from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import as_task_error, build_task
from raytrain_plus.task import Task


def check_files(job: Job, cls: type[Task]) -> str:
    """Compare the files of the task's initial values with its model; return a remark on what the model does not take.

    No values are read. If the model cannot be built without values, only the files are opened. Raises `TaskError` for
    files that cannot be read, or do not fit, and for patterns of `Task.rebuilt` that fit nothing.
    """
    if cls.weights is Task.weights and cls.rebuilt is Task.rebuilt:
        return ""
    # Imported here because these modules load torch.
    from torch import nn

    from raytrain_plus.training.model.given_weights import given_weights
    from raytrain_plus.training.model.model import model_without_values
    from raytrain_plus.training.model.rebuilt import check_rebuilt

    task = build_task(cls, job.args)
    with as_task_error(f"the weights of {cls.__name__} cannot be checked", f"task: {job.task}"):
        given, model = given_weights(task), model_without_values(task)
        if not isinstance(model, nn.Module):
            return ""
        check_rebuilt(task, model.named_parameters())
        if given is None:
            return ""
        return given.check(model, {} if task.layers() is None else task.tied())
