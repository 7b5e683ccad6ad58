"""Count how many bytes a job's training state takes on a worker, before any of it is built.

The model is built without values, and the optimizer is asked with small copies of the weights what it keeps.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from raytrain_plus.errors import TaskError
from raytrain_plus.job.settings import Job
from raytrain_plus.parallel.state_bytes import NO_STATE, StateSize
from raytrain_plus.task import Task
from raytrain_plus.training.model.given_weights import fits
from raytrain_plus.training.model.model import layer_names, model_without_values
from raytrain_plus.training.model.rebuilt import patterns_of
from raytrain_plus.training.weights.masters import copy_bytes
from raytrain_plus.training.weights.shardable import optimizer_bytes

EXACT_BYTES = 8
"""Bytes of a value's exact sum, beside its gradient."""


def count_state(job: Job, task: Task) -> StateSize | None:
    """Return the size of the state of the job's whole model; None if it cannot be built without values.

    `task`: used for nothing else.
    """
    found = count_parts(job, task)
    if found is None:
        return None
    whole = sum(found.values(), NO_STATE)
    return whole if whole.layered else replace(whole, largest=whole.weights + whole.gradients)


def count_parts(job: Job, task: Task) -> dict[str, StateSize] | None:
    """Return the size of the state of each layer of the job's model, or of each module of one that has no layers.

    None if the model cannot be built without values. `task`: used for nothing else.
    """
    model = model_without_values(task)
    if model is None:
        return None
    named = list(model.named_parameters())
    kept, patterns = optimizer_bytes(task, named, model), patterns_of(task)
    nothing = replace(NO_STATE, layered=_has_layers(task, job.seed))
    found = dict.fromkeys(dict(model.named_children()), nothing)
    for name, value in named:
        layer = name.partition(".")[0]
        size = _size_of(job, value, kept.get(name, 0), rebuilt=fits(name, patterns))
        found[layer] = found.get(layer, nothing) + size
    return {layer: replace(size, largest=size.weights + size.gradients) for layer, size in found.items()}


def _size_of(job: Job, value: nn.Parameter, kept: int, *, rebuilt: bool) -> StateSize:
    """Return the size of the state of one weight, of which the optimizer keeps `kept` bytes."""
    if not value.requires_grad:
        return replace(NO_STATE, frozen=value.nbytes, saved=0 if rebuilt else value.nbytes)
    exact = EXACT_BYTES if job.reduction == "exact" else 0
    own = copy_bytes(value) if job.precision == "bf16-params" else value.nbytes
    kept += value.nbytes if job.ema is not None else 0
    return replace(
        NO_STATE,
        weights=own,
        changed=value.nbytes,
        masters=value.nbytes if own < value.nbytes else 0,
        gradients=value.numel() * exact + value.nbytes,
        kept=kept,
        saved=value.nbytes + kept,
    )


def _has_layers(task: Task, seed: int) -> bool:
    try:
        return bool(layer_names(task, seed))
    except TaskError:
        return False
