"""What a model replica makes of a microbatch: a loss to backpropagate, or metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.device_copies import BatchCopies, to_device
from raytrain_plus.parallel.pipeline.chunk import Objective
from raytrain_plus.state.holding import MEAN_LOSS, WEIGHTED
from raytrain_plus.torch_compat import pytree
from raytrain_plus.training.exchange.thread_control import RowSpan
from raytrain_plus.training.passes.shard_reports import ShardReports
from raytrain_plus.training.passes.task_loss import check_depends, held_out_metrics, task_loss
from raytrain_plus.training.update.train_state import TrainState


class MicrobatchLoss:
    """The task's loss and metrics, on the device of a state and by its rules."""

    def __init__(self, state: TrainState) -> None:
        """Prepare for microbatches of the model that `state` is of."""
        self._task, self._device = state.task, state.device
        self._sums, self._rules = state.sums, state.rules
        self._on_device = BatchCopies(state.device)

    def objective(self, model: nn.Module, one: Microbatch, place: RowSpan, reports: ShardReports) -> Objective:
        """Return what is backpropagated of a microbatch, and add its mean loss to the reports.

        Raises `TrainingError` if the loss depends on no trained parameter.
        """
        factor, mean = self._sums.loss_factor, self._rules[MEAN_LOSS]
        outputs: list[Any] = []
        # Only a weight on a device needs what the model returns.
        handle = model.register_forward_hook(lambda _, __, output: outputs.append(output))
        try:
            found = task_loss(self._task, model, self._on_device(one.batch), one.rows)
        finally:
            handle.remove()
        check_depends(found.loss, f"the loss of shard {place.shard} in step {place.step}")
        reports.add(place.step, place.shard, one, *found)
        if isinstance(found.weight, torch.Tensor):
            if _mask(outputs, found.weight):
                return found.objective(factor, mean=mean)
            # A loss that calls modules of the model has no outputs here, so the host must know.
            found = found._replace(weight=float(found.weight))
        if not found.weight and found.loss.requires_grad:
            return Objective(_without_effect(found.loss), 0.0)
        return found.objective(factor, mean=mean)

    def metrics(self, model: nn.Module, batch: Any, rows: int, *, copy: bool = False) -> Any:
        """Return what the task's `evaluate` returns for a held-out batch, or for a `copy`, which it may change."""
        given = to_device(batch, self._device, copy=copy)
        return held_out_metrics(self._task, model, given, rows, weighted=self._rules[WEIGHTED])


def _without_effect(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that gives all that `loss` depends on gradients of zeros.

    A microbatch of weight 0 has it in place of its own, which is often a mean of nothing: NaN, as its gradients, and
    NaN times 0 is NaN. All workers make the same passes and sums as ever.
    """
    nothing = [(value.new_zeros(()) * value).sum() for value in _leaves(loss)]
    return torch.stack([(one.real if one.is_complex() else one).float() for one in nothing]).sum()


def _leaves(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that get a gradient in the backward pass of a value: parameters, and inputs of a stage."""
    found, seen, left = list[torch.Tensor](), set[Any](), [value.grad_fn]
    if value.grad_fn is None:
        return [value]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        left += [before for before, _ in node.next_functions]
    return found


def _mask(outputs: Any, weight: torch.Tensor) -> bool:
    """Have the gradients of these outputs set to zero if the weight is 0, without reading it from its device.

    Returns whether there are any.
    """
    found = [one for one in pytree.tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
    for one in found:
        one.register_hook(lambda gradient: gradient.masked_fill(weight == 0, 0))
    return bool(found)
