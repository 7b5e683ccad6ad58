"""Build a task's learning-rate scheduler, refuse one that a run cannot step, and read the rates."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from raytrain_plus.errors import TaskError
from raytrain_plus.task import Task
from raytrain_plus.training.weights.optimizer import ask_for_optimizer


def build_scheduler(task: Task, optimizer: torch.optim.Optimizer) -> Any:
    """Return the task's scheduler for an optimizer, or None.

    Raises `TaskError` if its `step` needs an argument, such as a metric: a run steps it without one after every step.
    """
    scheduler = task.scheduler(optimizer)
    needed = [] if scheduler is None else _needed(scheduler.step)
    if needed:
        raise TaskError(
            f"{type(scheduler).__name__}.step() needs {' and '.join(map(repr, needed))}, but is called without any",
            where=f"scheduler() of the task {type(task).__name__}",
            remedy="return a scheduler whose step() needs no argument, such as CosineAnnealingLR or LambdaLR",
        )
    return scheduler


def check_scheduler(task: Task, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise the same error given the model's parameters without values, if the task can be asked without them.

    An optimizer that needs values is left to the workers: they build the scheduler before their first step.
    """
    try:
        build_scheduler(task, ask_for_optimizer(task, [pair for pair in named if pair[1].requires_grad], None))
    except TaskError as error:
        if error.where.startswith("scheduler()"):
            raise
    except Exception:
        return


def rates_of(optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    """Return the learning rate of each parameter group in the optimizer's next step.

    Empty without an optimizer, and for one that has no learning rate, or none that is a number.
    """
    rates = []
    for group in () if optimizer is None else optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor) and rate.numel() == 1:
            rate = rate.item()
        if not isinstance(rate, (int, float)):
            return ()
        rates.append(float(rate))
    return tuple(rates)


def _needed(step: Any) -> list[str]:
    """Return the names of the arguments without which a function cannot be called."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        # A function of an extension module may have no signature.
        return []
    return [one.name for one in parameters if one.default is one.empty and one.kind not in variable]
