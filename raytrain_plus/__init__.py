"""raytrain_plus: elastic PyTorch training on Ray. Machines come and go; the training does not notice.

from raytrain_plus import Data, Job, Task, run
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raytrain_plus.errors import DataError, InputError, JobError, RaytrainError, RunError, TaskError
from raytrain_plus.job import Data, Elastic, Evaluate, Job, Parallel, Workers
from raytrain_plus.result import Result

if TYPE_CHECKING:
    from raytrain_plus.runner import run
    from raytrain_plus.task import Task

__all__ = [
    "Data",
    "DataError",
    "Elastic",
    "Evaluate",
    "InputError",
    "Job",
    "JobError",
    "Parallel",
    "RaytrainError",
    "Result",
    "RunError",
    "Task",
    "TaskError",
    "Workers",
    "run",
]


def __getattr__(name: str) -> Any:
    """`Task` and `run` bring torch and Ray along, which take seconds to load: they come when they are asked for."""
    if name == "Task":
        from raytrain_plus.task import Task

        return Task
    if name == "run":
        from raytrain_plus.runner import run

        return run
    raise AttributeError(f"module 'raytrain_plus' has no attribute '{name}'")
