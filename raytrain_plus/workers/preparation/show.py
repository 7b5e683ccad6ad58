"""Show what the task says of a model, for the result of the run."""

from __future__ import annotations

from contextlib import nullcontext

import safetensors.torch
import torch
from torch import nn

from raytrain_plus.job.task_loader import is_signal
from raytrain_plus.runs.folder import MODEL
from raytrain_plus.task import Task
from raytrain_plus.training.model.model import model_to_load
from raytrain_plus.workers.messages import WHOLE
from raytrain_plus.workers.preparation.prepared import Prepared
from raytrain_plus.workers.preparation.task_error import as_training_error


def show_model(prepared: Prepared, step: int, *, in_use: bool) -> str | None:
    """Return what the task shows of the model after `step`, which is in the run's folder.

    `in_use`: the model that this worker holds is in the middle of a step.
    """
    task = prepared.task
    if type(task).show is Task.show:
        return None
    state = prepared.own.at(step, WHOLE.stage)
    if state is None or not state.trained.everything:
        return _show_whole(prepared)
    if in_use:
        return None
    state.restore_buffers()
    precision = state.technique.precision
    # Weights in bfloat16 need inputs of their kind; others compute as in the exported model.
    with state.averaged(), precision.autocast() if precision.has_masters else nullcontext():
        return _shown(task, state.module)


def _show_whole(prepared: Prepared) -> str | None:
    """Return what the task shows of the model, loaded from the run's folder: this worker has only a part of it."""
    task, run = prepared.task, prepared.run_folder()
    try:
        local = run.path_of(MODEL)
        weights = safetensors.torch.load(run.read(MODEL)) if local is None else safetensors.torch.load_file(local)
        module = model_to_load(task, prepared.plan.job.seed)
        # The file lacks frozen weights that are built here, and what modules return from `get_extra_state`.
        module.load_state_dict(weights, strict=False)
    except BaseException as error:
        if is_signal(error):
            raise
        return f"the whole model could not be assembled for Task.show: {type(error).__name__}: {error}"
    return _shown(task, module)


def _shown(task: Task, module: nn.Module) -> str | None:
    module.eval()
    try:
        with torch.no_grad():
            return task.show(module)
    except BaseException as error:
        if is_signal(error):
            raise
        # A failure here must not lose the model.
        return f"Task.show failed: {as_training_error(error)}"
