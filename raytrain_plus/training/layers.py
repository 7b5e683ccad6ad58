"""The layer names of a job whose model is partitioned into stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import build_task, load_task, told_as_task_error


def layers_of(job: Job, roots: Sequence[Path]) -> tuple[str, ...] | None:
    """Return the layer names in order, or None if the model is not partitioned.

    Raises `TaskError` if the task does not declare its layers.
    """
    if job.parallel.pipeline == 1:
        return None
    # Imported here because it loads torch.
    from raytrain_plus.training.model import layer_names

    task = build_task(load_task(job.task, roots), job.args)
    with told_as_task_error(f"the layers of {type(task).__name__} cannot be built", f"task: {job.task}"):
        return layer_names(task, job.seed)
