"""raytrain_plus: elastic PyTorch training on Ray. Training continues while machines join and leave.

from raytrain_plus import Data, Job, Task, run
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raytrain_plus.errors import CheckpointError, DataError, InputError, JobError, RaytrainError, RunError, TaskError
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import (
    Checkpoint,
    EarlyStop,
    Elastic,
    Ema,
    Evaluate,
    Job,
    KeepBest,
    Parallel,
    Profile,
    Workers,
)
from raytrain_plus.result import Result

if TYPE_CHECKING:
    from raytrain_plus import schedules
    from raytrain_plus.launch.handle import Handle, attach
    from raytrain_plus.launch.runner import resume, run, start
    from raytrain_plus.runs.export import load
    from raytrain_plus.session.session import Session
    from raytrain_plus.task import RunFacts, StopRun, Task, WeightFiles

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Data",
    "DataError",
    "EarlyStop",
    "Elastic",
    "Ema",
    "Evaluate",
    "Handle",
    "InputError",
    "Job",
    "JobError",
    "KeepBest",
    "Parallel",
    "Profile",
    "RaytrainError",
    "Result",
    "RunError",
    "RunFacts",
    "Session",
    "StopRun",
    "Task",
    "TaskError",
    "WeightFiles",
    "Workers",
    "attach",
    "load",
    "resume",
    "run",
    "schedules",
    "start",
]


def __getattr__(name: str) -> Any:
    """Load names that need torch or Ray on first use, because these take seconds to import."""
    if name in ("Task", "RunFacts", "StopRun", "WeightFiles"):
        from raytrain_plus import task

        return getattr(task, name)
    if name == "Session":
        from raytrain_plus.session.session import Session

        return Session
    if name in ("run", "resume", "start"):
        from raytrain_plus.launch import runner

        return getattr(runner, name)
    if name in ("Handle", "attach"):
        from raytrain_plus.launch import handle

        return getattr(handle, name)
    if name == "load":
        from raytrain_plus.runs.export import load

        return load
    if name == "schedules":
        return import_module("raytrain_plus.schedules")
    raise AttributeError(f"module 'raytrain_plus' has no attribute '{name}'")
