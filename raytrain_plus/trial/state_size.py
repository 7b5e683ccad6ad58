"""Count how many bytes a job's training state takes on a worker, before any of it is built.

The model is built without values, and the optimizer is asked with small copies of the weights what it keeps. The parts
and their shares are those of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, figure 1), with each row on `holders` workers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from raytrain_plus.errors import TaskError
from raytrain_plus.job.setting_types import Sharded
from raytrain_plus.job.settings import Job
from raytrain_plus.parallel.sizing import share_of
from raytrain_plus.task import Task
from raytrain_plus.training.model.given_weights import fits
from raytrain_plus.training.model.model import layer_names, model_without_values
from raytrain_plus.training.model.rebuilt import patterns_of
from raytrain_plus.training.weights.masters import copy_bytes
from raytrain_plus.training.weights.shardable import optimizer_bytes

LAYERS_AT_ONCE = 2
"""Layers whose weights, or gradients, exist together where they are gathered: while one computes, the next arrives."""
EXACT_BYTES = 8
"""Bytes of a value's exact sum, beside its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSize:
    """The bytes of the parts of a whole training state."""

    weights: int
    """Trained weights, as the model computes with them."""
    frozen: int
    changed: int
    """Trained weights, as the optimizer changes them."""
    masters: int
    """Those of them that the model has copies of."""
    gradients: int
    """Sums of gradients."""
    kept: int
    """The optimizer's state, and the averages of the weights."""
    saved: int
    """What the workers write of it into a checkpoint, which each copies its share of first."""
    largest: int
    """The weights and gradients of the largest layer; of the whole model if it has no layers."""
    layered: bool
    """Whether the model declares its layers."""

    def needed(self, sharded: Sharded, share: Fraction, *, offloaded: bool = False, apart: bool = False) -> int:
        """Return the bytes on each worker that has this share of what is sharded.

        `apart`: whether the host's memory, to which the optimizer is offloaded, is not the one that is counted.
        """
        # Rows that the optimizer changes in memory of their own come with copies of their gradients.
        masters = self.changed if offloaded or sharded == "full" else self.masters
        copies = self.changed if offloaded or sharded == "full" else 0
        rows = 0 if offloaded and apart else masters + copies + self.kept
        if sharded == "full":
            return self.frozen + LAYERS_AT_ONCE * self.largest + int(share * rows)
        return self.frozen + self.weights + self.gradients + int(share * rows)

    def of(self, job: Job, workers: int, *, apart: bool = False) -> int:
        """Return the bytes on each of `workers` workers of the job, with its copy for checkpoints: see `needed`."""
        parallel, offloaded = job.parallel, job.offload == "optimizer"
        state = self.needed(parallel.sharded, share_of(parallel, workers), offloaded=offloaded, apart=apart)
        return state if apart else state + self.saved // workers


def count_state(job: Job, task: Task) -> StateSize | None:
    """Return the size of the state of the job's whole model; None if it cannot be built without values.

    `task`: used for nothing else.
    """
    model = model_without_values(task)
    if model is None:
        return None
    named = list(model.named_parameters())
    exact = EXACT_BYTES if job.reduction == "exact" else 0
    weights = frozen = changed = masters = gradients = rebuilt = 0
    patterns = patterns_of(task)
    layers = defaultdict[str, int](int)
    for name, value in named:
        if not value.requires_grad:
            frozen += value.nbytes
            rebuilt += value.nbytes if fits(name, patterns) else 0
            continue
        own = copy_bytes(value) if job.precision == "bf16-params" else value.nbytes
        summed = value.numel() * exact + value.nbytes
        weights, changed, gradients = weights + own, changed + value.nbytes, gradients + summed
        masters += value.nbytes if own < value.nbytes else 0
        layers[name.partition(".")[0]] += own + summed
    layered = _has_layers(task, job.seed)
    kept = optimizer_bytes(task, named, model) + (changed if job.ema is not None else 0)
    return StateSize(
        weights=weights,
        frozen=frozen,
        changed=changed,
        masters=masters,
        gradients=gradients,
        kept=kept,
        saved=frozen - rebuilt + changed + kept,
        largest=max(layers.values()) if layered else weights + gradients,
        layered=layered,
    )


def _has_layers(task: Task, seed: int) -> bool:
    try:
        return bool(layer_names(task, seed))
    except TaskError:
        return False
