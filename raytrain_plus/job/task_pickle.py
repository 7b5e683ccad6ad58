"""Pickle the class of a task that workers cannot import, because a notebook or a script holds it."""

from __future__ import annotations

import contextlib
import sys

import cloudpickle

from raytrain_plus.errors import TaskError
from raytrain_plus.job.settings import Job


def task_name(task: str | type) -> str:
    """Return `module:Class`."""
    return task if isinstance(task, str) else f"{task.__module__}:{task.__qualname__}"


def task_to_send(job: Job) -> bytes | None:
    """Return the pickled task class if the job holds the class itself; None if workers import it by name."""
    if isinstance(job.task, str):
        return None
    module = sys.modules[job.task.__module__]
    named = module.__name__ != "__main__"
    try:
        if named:
            cloudpickle.register_pickle_by_value(module)
        pickled: bytes = cloudpickle.dumps(job.task)
        return pickled
    except Exception as error:
        raise TaskError(
            f"{job.task.__qualname__} cannot be sent to a worker: {type(error).__name__}: {error}",
            where=f"task: {task_name(job.task)}",
            remedy="keep locks, files, connections and loaded models out of module globals and class attributes; "
            "make them in the task's methods",
        ) from error
    finally:
        if named:
            with contextlib.suppress(ValueError):
                cloudpickle.unregister_pickle_by_value(module)
