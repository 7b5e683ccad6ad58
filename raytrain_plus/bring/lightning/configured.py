"""What `configure_optimizers` returns, in all its forms, as one optimizer and its schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raytrain_plus.errors import TaskError

WHERE = "configure_optimizers"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A scheduler of Lightning, and when it is stepped."""

    scheduler: Any
    interval: str = "epoch"
    """`step` or `epoch`."""
    frequency: int = 1


@dataclass(frozen=True, slots=True)
class Configured:
    """The optimizer of a module, and its schedulers."""

    optimizer: torch.optim.Optimizer
    schedules: tuple[Schedule, ...] = ()


def read_configured(returned: Any) -> Configured:
    """Return what `configure_optimizers` returned. Raises `TaskError` for what a run cannot step."""
    optimizers, schedulers = _parts(returned)
    if len(optimizers) != 1:
        raise TaskError(
            f"configure_optimizers returned {len(optimizers)} optimizers",
            where=WHERE,
            expected="one optimizer",
            remedy="give one optimizer several parameter groups; several optimizers need a Task of raytrain_plus",
        )
    if type(optimizers[0]).__name__ == "LightningOptimizer":
        raise TaskError(f"{WHERE} returned a LightningOptimizer", where=WHERE, expected="an optimizer of torch")
    return Configured(optimizers[0], tuple(_schedule(one, optimizers[0]) for one in schedulers))


def _parts(returned: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedulers."""
    if returned is None:
        raise TaskError(
            "configure_optimizers returned None, so nothing would be trained", where=WHERE, expected="an optimizer"
        )
    if isinstance(returned, torch.optim.Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _of_mappings([returned])
    if isinstance(returned, (list, tuple)) and returned:
        if len(returned) == 2 and isinstance(returned[0], list):
            schedulers = returned[1] if isinstance(returned[1], list) else [returned[1]]
            return returned[0], schedulers
        if all(isinstance(one, Mapping) for one in returned):
            return _of_mappings(returned)
        if all(isinstance(one, torch.optim.Optimizer) for one in returned):
            return list(returned), []
    raise TaskError(
        f"configure_optimizers returned {type(returned).__name__}",
        where=WHERE,
        expected="an optimizer, ([optimizer], [scheduler]), or {'optimizer': ..., 'lr_scheduler': ...}",
    )


def _of_mappings(given: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    for one in given:
        if "optimizer" not in one:
            raise TaskError("a dict of configure_optimizers has no 'optimizer'", where=WHERE)
    schedulers = [one["lr_scheduler"] for one in given if one.get("lr_scheduler") is not None]
    return [one["optimizer"] for one in given], schedulers


def _schedule(given: Any, optimizer: torch.optim.Optimizer) -> Schedule:
    named = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = named.get("scheduler")
    if isinstance(scheduler, ReduceLROnPlateau) or named.get("reduce_on_plateau"):
        raise TaskError(
            f"the scheduler {type(scheduler).__name__} needs a metric, and a run steps schedulers without one",
            where=WHERE,
            remedy="use a schedule as long as the run, such as those of raytrain_plus.schedules with "
            "self.trainer.estimated_stepping_batches",
        )
    if not all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict")):
        raise TaskError(f"the scheduler is {type(scheduler).__name__}", where=WHERE, expected="a scheduler of torch")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise TaskError("a scheduler is of another optimizer than the one that is returned", where=WHERE)
    interval, frequency = named.get("interval", "epoch"), named.get("frequency", 1)
    if interval not in ("step", "epoch"):
        raise TaskError(f"the scheduler's interval is {interval!r}", where=WHERE, expected="'step' or 'epoch'")
    if not isinstance(frequency, int) or frequency < 1:
        raise TaskError(f"the scheduler's frequency is {frequency!r}", where=WHERE, expected="1 or more")
    return Schedule(scheduler, interval, frequency)


class EpochSchedules:
    """Steps the schedulers of a module as Lightning does, and counts the steps and the epochs of a run.

    It is part of the training state, so that every worker has the same counts.
    """

    def __init__(self, schedules: Sequence[Schedule], batch_size: int, rows: int | None) -> None:
        """`batch_size`: rows of a step. `rows`: those of an epoch; None if they are not known.

        Raises `TaskError` if a scheduler needs them.
        """
        if rows is None and any(one.interval == "epoch" for one in schedules):
            raise TaskError(
                "a scheduler is stepped at the end of each epoch, and how long an epoch is is not known",
                where=WHERE,
                remedy="{'scheduler': ..., 'interval': 'step'}, or the number of rows in args.rows",
            )
        self.on_epoch_end: Callable[[], None] | None = None
        """Called when the last step of an epoch has been applied."""
        self.last_epoch = 0
        """The steps made, by the name under which a run asks a scheduler for them."""
        self._schedules, self._batch_size, self._rows = tuple(schedules), batch_size, rows

    @property
    def epoch(self) -> int:
        """The epoch of the next step, counted from 0."""
        return self._epoch_after(self.last_epoch)

    @property
    def step_of_epoch(self) -> int:
        """The number of the next step in its epoch, counted from 0."""
        return self.last_epoch - self._first_step(self.epoch)

    def step(self) -> None:
        """Step the schedulers whose turn it is."""
        before, in_epoch = self.epoch, self.step_of_epoch
        self.last_epoch += 1
        ended = range(before, self.epoch)
        for one in self._schedules:
            if one.interval == "step" and (in_epoch + 1) % one.frequency == 0:
                one.scheduler.step()
            for epoch in ended if one.interval == "epoch" else ():
                if (epoch + 1) % one.frequency == 0:
                    one.scheduler.step()
        if self.on_epoch_end is not None:
            for _ in ended:
                self.on_epoch_end()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the states of the schedulers."""
        return {"steps": self.last_epoch, "schedulers": [one.scheduler.state_dict() for one in self._schedules]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned."""
        self.last_epoch = state["steps"]
        for one, held in zip(self._schedules, state["schedulers"], strict=True):
            one.scheduler.load_state_dict(held)

    def _epoch_after(self, steps: int) -> int:
        return 0 if not self._rows else steps * self._batch_size // self._rows

    def _first_step(self, epoch: int) -> int:
        return 0 if not self._rows else -(-epoch * self._rows // self._batch_size)
