"""The task's loss of a microbatch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn

from raytrain_plus.data.values.collate import default_weight
from raytrain_plus.errors import TrainingError
from raytrain_plus.parallel.pipeline.chunk import Objective
from raytrain_plus.state.named import dtype_name
from raytrain_plus.task import Task
from raytrain_plus.training.passes.shard_reports import Number

KEYS = ("loss", "weight", "metrics")
"""The keys of the mapping that a loss may return."""
MOST_METRICS = 64
"""Maximum number of metrics that a loss may return."""
TAKEN = ("grad_norm", "loss", "samples_per_second")
"""Names of what a run itself reports of each step."""
_EXPECTED = (
    "expected the mean loss, a tensor with one value, or a mapping of which weight and metrics may be left out: "
    '{"loss": tensor, "weight": number, "metrics": {"name": number}}'
)


class TaskLoss(NamedTuple):
    """What the task's loss says of a microbatch."""

    loss: torch.Tensor
    """The mean, a scalar."""
    weight: Number
    """On its device, if the task returned a tensor."""
    metrics: Mapping[str, Number]
    """Means by name, weighted as the loss is."""

    def objective(self, factor: float, *, mean: bool) -> Objective:
        """Return what is backpropagated: the loss times `factor`.

        `mean`: see `state.holding.MEAN_LOSS`; else times the weight, the same bits wherever that is.
        """
        weight = self.weight
        if isinstance(weight, torch.Tensor):
            # The task may change its tensor.
            weight = weight.to(torch.float64, copy=True)
        if mean and isinstance(weight, torch.Tensor):
            # The loss may depend on parameters by ways that lead through no output of the model.
            loss = torch.where(weight == 0, self.loss.new_zeros(()), self.loss)
            return Objective(loss if factor == 1.0 else loss * factor, weight)
        if mean:
            return Objective(self.loss if factor == 1.0 else self.loss * factor, weight)
        if isinstance(weight, torch.Tensor):
            return Objective(self.loss * (weight * factor).to(self.loss.dtype), 1.0)
        return Objective(self.loss * (weight * factor), 1.0)


def task_loss(task: Task, model: nn.Module, batch: Any, rows: int) -> TaskLoss:
    """Return the task's mean loss of a batch, its weight and its metrics.

    The weight is the number of rows, or of tokens if `data.collate` packs them, unless the task gives one. Raises
    `TrainingError` if the task returns anything else.
    """
    who = f"{type(task).__name__}.loss"
    # Before the task's code, which may change its batch.
    weight: Number = default_weight(task, batch, rows)
    result = task.loss(model, batch)
    if not isinstance(result, Mapping):
        return TaskLoss(_scalar(result, who), weight, {})
    others = [repr(key) for key in result if key not in KEYS]
    if others or "loss" not in result:
        what = f"the keys {', '.join(others)}" if others else "a mapping without the key 'loss'"
        raise TrainingError(f"{who} returned {what}; {_EXPECTED}")
    loss = _scalar(result["loss"], who)
    weight = _number(result.get("weight", weight), f"{who} returned a weight that is")
    return TaskLoss(loss, weight, _metrics(result.get("metrics", {}), who))


def held_out_metrics(task: Task, model: nn.Module, batch: Any, rows: int, *, weighted: bool = True) -> Any:
    """Return what the task's `evaluate` returns for a held-out batch; by default the loss, with its weight.

    `weighted`: see `state.holding.WEIGHTED`.
    """
    if type(task).evaluate is not Task.evaluate:
        return task.evaluate(model, batch)
    found = task_loss(task, model, batch, rows)
    metrics = {"loss": found.loss, **found.metrics}
    return {"metrics": metrics, "weight": found.weight} if weighted else metrics


def _scalar(loss: Any, who: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise TrainingError(f"{who} returned {_kind(loss)}; {_EXPECTED}")
    if loss.numel() != 1:
        raise TrainingError(f"{who} returned a loss of shape {tuple(loss.shape)}; {_EXPECTED}")
    if not loss.is_floating_point():
        raise TrainingError(f"{who} returned a loss of dtype {loss.dtype}, which has no gradient; {_EXPECTED}")
    if loss.dtype in (torch.float16, torch.bfloat16):
        warnings.warn(
            f"{who} returned a loss in {dtype_name(loss.dtype)}, which has three digits at most; compute it from "
            "float32 values, such as logits.float()",
            stacklevel=2,
        )
    scalar: torch.Tensor = loss.reshape(())
    return scalar.to(torch.promote_types(scalar.dtype, torch.float32))


def _metrics(metrics: Any, who: str) -> dict[str, Number]:
    """Return the metrics as numbers. Raises `TrainingError` for names or values that cannot be reported."""
    if not isinstance(metrics, Mapping):
        raise TrainingError(f"{who} returned {_kind(metrics)} as metrics; {_EXPECTED}")
    if len(metrics) > MOST_METRICS:
        raise TrainingError(f"{who} returned {len(metrics)} metrics; at most {MOST_METRICS} are supported")
    for name in metrics:
        if not isinstance(name, str) or not name or name in TAKEN:
            raise TrainingError(
                f"{who} returned a metric named {name!r}; expected text other than {', '.join(map(json.dumps, TAKEN))}"
            )
    return {name: _number(value, f"{who} returned the metric '{name}', which is") for name, value in metrics.items()}


def _number(value: Any, what: str) -> Number:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TrainingError(f"{what} a {value.dtype} of shape {tuple(value.shape)}; expected one number")
        # To read it would make this thread wait for its device.
        return value.detach().reshape(())
    if not isinstance(value, Real):
        raise TrainingError(f"{what} {_kind(value)}; expected one number")
    return float(value)


def _kind(value: Any) -> str:
    if isinstance(value, tuple) and type(value) is tuple:
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def check_depends(loss: torch.Tensor, what: str) -> None:
    """Raise `TrainingError` if `loss`, which is `what`, depends on no parameter although gradients are recorded."""
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise TrainingError(
            f"{what} depends on no trained parameter: Task.loss must return a tensor that it computed from the "
            "model's output, without detach(), item() or torch.no_grad()"
        )
