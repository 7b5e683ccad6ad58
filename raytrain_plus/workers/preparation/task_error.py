"""Turn an exception of the user's code into an error of the run."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

import torch
from torch import nn

from raytrain_plus.errors import TrainingError
from raytrain_plus.job.task_loader import out_of_memory, trim_traceback
from raytrain_plus.storage.size_text import size_text

REMEDY = (
    "use more microbatches, a smaller batch, recompute: full, precision: bf16-params, parallel.sharded, or a larger "
    "machine"
)


def as_training_error(error: BaseException, rows: str = "", modules: Mapping[int, str] | None = None) -> TrainingError:
    """Return the `TrainingError` that reports `error`, with the user's part of its traceback.

    `rows`: which rows were computed with. `modules`: the names of the model's modules, by `id`.
    """
    kind = type(error).__name__
    what = f"the task raised {kind}: {error}"
    if out_of_memory(error):
        module = _module_of(error, modules or {})
        where = f" in '{module}'" if module else ""
        what = f"out of memory{where} ({kind}): {error}{_peak(error)}; {REMEDY}"
    return TrainingError(f"{what}; the rows: {rows}" if rows else what, trim_traceback(error))


def _module_of(error: BaseException, modules: Mapping[int, str]) -> str:
    """Return the innermost module of the model whose method was running; empty if none was, as in a backward pass."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        one = frame.f_locals.get("self")
        if isinstance(one, nn.Module):
            found = modules.get(id(one)) or found
    return found


def _peak(error: BaseException) -> str:
    """Return the most memory of the GPU that tensors have taken, in words."""
    if not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_initialized():
        return ""
    _, whole = torch.cuda.mem_get_info()
    most = torch.cuda.max_memory_allocated()
    return f" (tensors took up to {size_text(most)} of its {size_text(whole)})"
