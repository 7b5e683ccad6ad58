"""Build a task's optimizer, and refuse one that a run cannot step, save or divide."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from raytrain_plus.errors import TaskError
from raytrain_plus.task import Task

NAMED = 3
"""Maximum number of parameters that an error names."""


def takes_model(task: Task) -> bool:
    """Return whether `Task.optimizer` asks for the model as a second argument."""
    try:
        taken = list(inspect.signature(task.optimizer).parameters.values())
    except (TypeError, ValueError):
        # A function of an extension module may have no signature.
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(taken) > 1 and taken[1].kind in kinds and taken[1].default is inspect.Parameter.empty


def ask_for_optimizer(
    task: Task, named: Sequence[tuple[str, nn.Parameter]], model: nn.Module | None
) -> torch.optim.Optimizer:
    """Return what `Task.optimizer` returns for these (name, parameter) pairs.

    `model`: for tasks that ask for it; None if no worker has one. Raises `TaskError` if the task asks in vain.
    """
    if not takes_model(task):
        return task.optimizer(named)
    if model is None:
        raise TaskError(
            "optimizer(parameters, model) needs a model, but no worker of this job has one whole",
            where=_where(task),
            remedy="make the optimizer of the (name, parameter) pairs alone",
        )
    optimizer: torch.optim.Optimizer = task.optimizer(named, model)  # type: ignore[call-arg]
    return optimizer


def build_optimizer(
    task: Task, named: Sequence[tuple[str, nn.Parameter]], model: nn.Module | None
) -> torch.optim.Optimizer:
    """Return the task's optimizer of these (name, parameter) pairs.

    `model`: see `ask_for_optimizer`. Raises `TaskError` for an optimizer of other parameters, and for one whose steps
    need what a run does not give: a closure, sparse gradients, or modes of its own.
    """
    optimizer = ask_for_optimizer(task, named, model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"optimizer() returned {type(optimizer).__name__}", where=_where(task), expected="a torch.optim.Optimizer"
        )
    _check_steps(task, optimizer)
    _check_parameters(task, optimizer, {id(value) for _, value in named}, model)
    return optimizer


def _check_steps(task: Task, optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    if _needs_closure(optimizer):
        raise TaskError(
            f"{kind}.step() needs a closure that computes the loss again, which a step over several workers cannot do",
            where=_where(task),
            remedy="use an optimizer whose step() needs no argument, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TaskError(
            f"{kind} needs sparse gradients, but gradients are summed over workers as dense ones",
            where=_where(task),
            remedy="use torch.optim.Adam or AdamW, and nn.Embedding without sparse=True",
        )
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise TaskError(
            f"{kind} has train() and eval(): between its steps the weights are not those of the model, so evaluations, "
            "checkpoints and the exported model would hold others",
            where=_where(task),
            remedy="use an optimizer without modes, such as torch.optim.AdamW, with a schedule from "
            "raytrain_plus.schedules; `ema` averages weights",
        )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        taken = inspect.signature(optimizer.step).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.name == "closure" and one.default is inspect.Parameter.empty for one in taken)


def _check_parameters(
    task: Task, optimizer: torch.optim.Optimizer, given: Collection[int], model: nn.Module | None
) -> None:
    """Raise `TaskError` if the optimizer has parameters that it was not given: these are never summed or saved."""
    others = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in given]
    if not others:
        return
    names = {id(value): name for name, value in (() if model is None else model.named_parameters())}
    said = [f"'{names[id(one)]}'" if id(one) in names else f"one of shape {list(one.shape)}" for one in others]
    rest = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
    raise TaskError(
        f"the optimizer has parameters that optimizer() was not given: {', '.join(said[:NAMED])}{rest}",
        where=_where(task),
        expected="those of the pairs that it gets: with `parallel.sharded`, lower precisions and `offload` these are "
        "not the model's own",
        remedy="make its groups of the (name, parameter) pairs; for the types of modules, define "
        "optimizer(self, parameters, model)",
    )


def _where(task: Task) -> str:
    return f"optimizer() of the task {type(task).__name__}"


def _unknown_parameters(task: Task, known: Collection[int]) -> list[tuple[str, Any]]:
    """Return the trainable tensors among the task's attributes, by name, that are not `known` by their identity."""
    found: list[tuple[str, Any]] = []
    for name, held in vars(task).items():
        values = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else (held,)
        for value in values:
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
                found.append((name, value))
            elif isinstance(value, nn.Module):
                found += [(f"{name}.{inner}", one) for inner, one in value.named_parameters() if one.requires_grad]
    return [(name, value) for name, value in found if id(value) not in known]


def check_own_parameters(task: Task, known: Collection[int]) -> None:
    """Raise `TaskError` if a backward pass has given gradients to tensors of the task that are not `known`.

    They belong to no worker's state: nobody sums, divides, changes or saves them.
    """
    used = [name for name, value in _unknown_parameters(task, known) if value.grad is not None]
    if used:
        raise TaskError(
            f"the loss depends on the task's own parameter '{used[0]}', which no optimizer changes and no checkpoint "
            "holds",
            where=f"the task {type(task).__name__}",
            expected="parameters in the model alone",
            remedy="make it a parameter of the module that model() returns, or a tensor without requires_grad",
        )
