"""The layer names of a job whose model is partitioned into stages."""

from __future__ import annotations

from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import as_task_error, build_task
from raytrain_plus.task import Task


def layers_of(job: Job, cls: type[Task]) -> tuple[str, ...] | None:
    """Return the names of the layers of the job's task in order, or None if each worker holds the whole model.

    Raises `TaskError` if the task does not declare its layers, which `parallel.sharded: full` needs, too.
    """
    parallel = job.parallel
    if not parallel.by_layer:
        return None
    # Imported here because it loads torch.
    from raytrain_plus.training.model.model import layer_names

    task = build_task(cls, job.args)
    with as_task_error(f"the layers of {type(task).__name__} cannot be built", f"task: {job.task}"):
        if parallel.sharded == "full":
            names = layer_names(task, job.seed, setting="parallel.sharded: full")
        else:
            cut = ("tensor" if parallel.tensor > 1 else "experts") if parallel.in_one_stage else "pipeline"
            setting = f"parallel.{cut}: {getattr(parallel, cut)}"
            names = layer_names(task, job.seed, in_one=parallel.in_one_stage, setting=setting)
    return names if parallel.in_parts else None
