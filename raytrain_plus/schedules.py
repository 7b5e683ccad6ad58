"""Learning-rate schedules as long as the run, for `Task.scheduler`: warm-up, then cosine, linear, or stable and decay.

    def scheduler(self, optimizer):
        return schedules.warmup_cosine(optimizer, self.run.total_steps, warmup=0.05)

Each scales the optimizer's own learning rates, group by group. A number of steps below 1 is a share of the run: 0.05 is
a twentieth. The rate rises over the warm-up, whose last step has the full rate, and would reach `end`, a share of the
full rate, in the step after the run's last one: no step is made with a rate of 0. A checkpoint holds the step and not
the length, so a run that is extended follows the schedule of its new length from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(
    optimizer: torch.optim.Optimizer, total_steps: int, *, warmup: float = 0, end: float = 0.0
) -> LambdaLR:
    """Return a schedule that warms up, then falls along half a cosine to the share `end` of the full rate.

    Raises `ValueError` for numbers out of range.
    """

    def fall(done: float) -> float:
        return end + (1 - end) / 2 * (1 + math.cos(math.pi * done))

    return _after_warmup(optimizer, total_steps, warmup, end, fall)


def warmup_linear(
    optimizer: torch.optim.Optimizer, total_steps: int, *, warmup: float = 0, end: float = 0.0
) -> LambdaLR:
    """Return a schedule that warms up, then falls in a straight line to the share `end` of the full rate.

    Raises `ValueError` for numbers out of range.
    """
    return _after_warmup(optimizer, total_steps, warmup, end, lambda done: 1 - (1 - end) * done)


def warmup_stable_decay(
    optimizer: torch.optim.Optimizer, total_steps: int, *, warmup: float = 0, decay: float = 0.2, end: float = 0.0
) -> LambdaLR:
    """Return a schedule that warms up, keeps the full rate, and falls in a straight line over the last `decay` steps.

    Raises `ValueError` for numbers out of range.
    """
    first, last = _steps("warmup", warmup, total_steps), _steps("decay", decay, total_steps)
    # A run too short for both shortens the decay.
    falls_from = max(first, total_steps - last)

    def fall(done: float) -> float:
        step = first + done * max(1, total_steps - first)
        return 1 - (1 - end) * max(0.0, step - falls_from) / max(1, total_steps - falls_from)

    return _after_warmup(optimizer, total_steps, warmup, end, fall)


def _after_warmup(
    optimizer: torch.optim.Optimizer, total_steps: int, warmup: float, end: float, fall: Callable[[float], float]
) -> LambdaLR:
    """Return a schedule whose rate is `fall(done)` after the warm-up; `done`: from 0 to 1 at the end of the run."""
    if total_steps < 1:
        raise ValueError(f"total_steps is {total_steps}; expected at least 1, such as self.run.total_steps of the task")
    if not 0 <= end <= 1:
        raise ValueError(f"end is {end}; expected a share of the full learning rate, from 0 to 1")
    first = _steps("warmup", warmup, total_steps)

    # A function and no object: of these, torch saves the attributes, and would load the length of the run before.
    def rate(step: int) -> float:
        if step < first:
            return (step + 1) / first
        return fall(min(1.0, (step - first) / max(1, total_steps - first)))

    return LambdaLR(optimizer, rate)


def _steps(name: str, value: float, total_steps: int) -> int:
    """Return a number of steps, given as such or as a share of the run."""
    if value < 0 or (value >= 1 and value != int(value)):
        raise ValueError(f"{name} is {value}; expected a whole number of steps, or a share of the run from 0 to 1")
    return round(value * total_steps) if value < 1 else int(value)
