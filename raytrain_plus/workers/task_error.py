"""Turn an exception of the user's code into an error of the run."""

from __future__ import annotations

from raytrain_plus.errors import TrainingError
from raytrain_plus.job.task_loader import out_of_memory, trim_traceback


def as_training_error(error: BaseException, step: int | None = None, rows: str = "") -> TrainingError:
    """Return the `TrainingError` that reports `error`, with the user's part of its traceback.

    `step`: the step that was computed or applied, if any; it does not count. `rows`: which rows it was computed with.
    """
    kind = type(error).__name__
    what = f"the task raised {kind}: {error}"
    if step is not None:
        what += f" (in step {step}, which was not applied)"
    if out_of_memory(error):
        what = f"out of memory ({kind}): {error}; use more microbatches, a smaller batch, or a larger machine"
    return TrainingError(f"{what}; the rows: {rows}" if rows else what, trim_traceback(error))
