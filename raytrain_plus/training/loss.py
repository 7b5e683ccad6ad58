"""The task's loss of a microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raytrain_plus.errors import TrainingError
from raytrain_plus.task import Task
from raytrain_plus.training.model import to_device


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a copy of a batch on the model's device.

    The step may be recomputed from the same batch and must give the same bits. A task that writes into its batch writes
    into a copy, whose memory layout does not depend on the source of the rows.
    """
    return to_device(batch, device, copy=True)


def weighted_loss(task: Task, model: nn.Module, batch: Any, rows: int) -> tuple[torch.Tensor, float]:
    """Return the task's mean loss of a batch and its weight.

    Raises `TrainingError` if the loss is not a single number.
    """
    result = task.loss(model, batch)
    loss, weight = result if isinstance(result, tuple) else (result, float(rows))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TrainingError(f"{type(task).__name__}.loss returned {shape}; expected a tensor with one value")
    return loss.reshape(()), float(weight)


def check_depends(loss: torch.Tensor, what: str) -> None:
    """Raise `TrainingError` if `loss`, which is `what`, depends on no parameter although gradients are recorded."""
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise TrainingError(
            f"{what} depends on no trained parameter: Task.loss must return a tensor that it computed from the "
            "model's output, without detach(), item() or torch.no_grad()"
        )
