"""What a module sees as `self.trainer` in a run: the facts of the run, and nothing that could change it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from raytrain_plus.bring.lightning.configured import EpochSchedules
from raytrain_plus.errors import TaskError
from raytrain_plus.task import RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """What is known of a run before it begins."""

    max_epochs: int | None = None
    max_steps: int = -1
    accumulate_grad_batches: int = 1
    precision: str = "32-true"
    default_root_dir: str = ""
    rows: int | None = None
    """Rows of an epoch, if they are known."""


class TrainerView:
    """The attributes of `lightning.Trainer` that a run has; others are refused by name.

    It has no `__dict__`: what changes in it with each step is no state of the model.
    """

    __slots__ = ("_datamodule", "_facts", "optimizer", "run", "schedules", "stage")

    def __init__(self, facts: TrainerFacts, datamodule: Any = None) -> None:
        self._facts = facts
        self._datamodule = datamodule
        self.run: RunFacts | None = None
        """Set once the run is known."""
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedules: EpochSchedules | None = None
        self.stage = ""
        """`train` or `validate` while a batch is computed."""

    max_epochs = property(lambda self: self._facts.max_epochs)
    max_steps = property(lambda self: self._facts.max_steps)
    accumulate_grad_batches = property(lambda self: self._facts.accumulate_grad_batches)
    precision = property(lambda self: self._facts.precision)
    default_root_dir = property(lambda self: self._facts.default_root_dir)
    log_dir = default_root_dir
    world_size = num_devices = num_nodes = property(lambda self: 1)
    global_rank = local_rank = node_rank = property(lambda self: 0)
    is_global_zero = property(lambda self: True)
    training = property(lambda self: self.stage == "train")
    validating = evaluating = property(lambda self: self.stage == "validate")
    sanity_checking = testing = predicting = fast_dev_run = barebones = property(lambda self: False)
    callback_metrics = logged_metrics = progress_bar_metrics = property(lambda self: {})
    callbacks = property(lambda self: [])
    current_epoch = property(lambda self: 0 if self.schedules is None else self.schedules.epoch)
    global_step = property(lambda self: 0 if self.schedules is None else self.schedules.last_epoch)
    logger = property(lambda self: SilentLogger())
    loggers = property(lambda self: [self.logger])

    @property
    def datamodule(self) -> Any:
        """The data module, if there is one in this process."""
        if self._datamodule is None:
            raise _refused("datamodule", "take what you need of it in setup, or give it to the module's constructor")
        return self._datamodule

    @property
    def batch_idx(self) -> int:
        """The number of the batch in its epoch, as `training_step` gets it."""
        return 0 if self.schedules is None else self.schedules.step_of_epoch

    @property
    def estimated_stepping_batches(self) -> int:
        """The steps of the run."""
        return self._known("estimated_stepping_batches").total_steps

    @property
    def num_training_batches(self) -> int:
        """The batches of one device in an epoch."""
        run, rows = self._known("num_training_batches"), self._facts.rows
        if rows is None:
            raise _refused("num_training_batches", "the number of rows is not known: give it as args.rows")
        return -(-rows * self._facts.accumulate_grad_batches // run.batch_size)

    @property
    def optimizers(self) -> list[Any]:
        """The settings of the optimizer's groups, such as rates; the optimizer itself is the run's."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return [SimpleNamespace(param_groups=settings)]

    @property
    def should_stop(self) -> bool:
        """False: a run ends by its settings."""
        return False

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        raise _refused("should_stop", "EarlyStopping, or raytrain stop")

    def _known(self, name: str) -> RunFacts:
        if self.run is None:
            raise _refused(name, "call it in configure_optimizers or later: the length of the run is not known before")
        return self.run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refused(name, "")


def _refused(name: str, remedy: str) -> TaskError:
    return TaskError(f"self.trainer.{name} is not offered in a run", where="LightningModule", remedy=remedy)


class SilentLogger:
    """Stands for a logger in a worker: a run reports what `self.log` is told, and nothing else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SilentLogger()

    def __call__(self, *args: Any, **kwargs: Any) -> SilentLogger:
        return self
