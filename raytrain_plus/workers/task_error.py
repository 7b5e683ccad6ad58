"""Turn an exception of the user's code into an error of the run."""

from __future__ import annotations

from raytrain_plus.errors import TrainingError
from raytrain_plus.job.task_loader import out_of_memory, trim_traceback


def as_training_error(error: BaseException, rows: str = "") -> TrainingError:
    """Return the `TrainingError` that reports `error`, with the user's part of its traceback.

    `rows`: which rows were computed with.
    """
    kind = type(error).__name__
    what = f"the task raised {kind}: {error}"
    if out_of_memory(error):
        what = f"out of memory ({kind}): {error}; use more microbatches, a smaller batch, or a larger machine"
    return TrainingError(f"{what}; the rows: {rows}" if rows else what, trim_traceback(error))
