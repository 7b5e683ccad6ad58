"""Callbacks and loggers of Lightning as settings of a job; a script's own are called in a process of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raytrain_plus.bring.lightning.lightning_task import ParcelledModule
from raytrain_plus.bring.lightning.module_checks import PACKAGES, lightning_class, overrides
from raytrain_plus.bring.trainer_task import Unknown
from raytrain_plus.errors import InputError, TaskError

WHERE = "Trainer(callbacks=...)"
_EMA = "run={'ema': {'decay': 0.999}} averages the weights"
REFUSED: Mapping[str, str] = {
    "BackboneFinetuning": "freeze parameters in __init__, and train again for the next phase",
    "BaseFinetuning": "freeze parameters in __init__, and train again for the next phase",
    "BasePredictionWriter": "call predict after fit",
    "BatchSizeFinder": "choose the batch size; memory that runs out is reported with a remedy",
    "EMAWeightAveraging": _EMA,
    "GradientAccumulationScheduler": "accumulate_grad_batches=4: the batch of a run is always the same",
    "LambdaCallback": "derive from Callback",
    "LearningRateFinder": "choose the rate in configure_optimizers",
    "ModelPruning": "prune the module after fit",
    "SpikeDetection": "run={'elastic': {'on_nonfinite': 'skip'}}",
    "StochasticWeightAveraging": _EMA,
    "WeightAveraging": _EMA,
}
"""Callbacks of Lightning that a run does not have -> what to use instead."""
BUILT_IN = (
    "DeviceStatsMonitor",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "ThroughputMonitor",
    "Timer",
)
"""Callbacks of Lightning for which a run does itself what they do."""
HEARD = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end", "on_validation_epoch_end")
"""What a callback of a script's own may define."""
_NEUTRAL = ("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint")


def own_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks of a script's own. Raises `InputError` for those that a run does not have."""
    found = []
    for one in callbacks:
        names = {kind.__name__ for kind in type(one).__mro__ if kind.__module__.startswith(PACKAGES)}
        for name in sorted(names & REFUSED.keys()):
            raise InputError(f"the callback {name} is not offered", where=WHERE, remedy=REFUSED[name])
        if names & set(BUILT_IN) and type(one).__module__.startswith(PACKAGES):
            continue
        plain = lightning_class(type(one), "Callback")
        if plain is None:
            raise InputError(f"{type(one).__name__} is no callback of Lightning", where=WHERE)
        for name in (name for name in vars(plain) if name.startswith(("on_", "setup", "teardown", "state_"))):
            if name not in (*HEARD, *_NEUTRAL) and overrides(one, name, "Callback"):
                raise InputError(
                    f"the callback {type(one).__name__} defines {name}, which a run does not call",
                    where=WHERE,
                    expected=", ".join(HEARD),
                )
        found.append(one)
    return found


def settings_of_callbacks(callbacks: Sequence[Any], epoch: Callable[[str], int]) -> dict[str, Any]:
    """Return the settings of a job that follow from callbacks. `epoch`: the steps of an epoch, for what needs them."""
    found: dict[str, Any] = {}
    for one in callbacks:
        if lightning_class(type(one), "EarlyStopping") is not None:
            found["early_stop"] = _early_stop(one)
        elif lightning_class(type(one), "ModelCheckpoint") is not None:
            found["checkpoint"] = _checkpoint(one, found.get("checkpoint", {}), epoch)
    if "early_stop" in found:
        # It keeps the best state as well.
        best = found.get("checkpoint", {}).pop("keep_best", None)
        stop = {key: found["early_stop"][key] for key in ("metric", "mode")}
        if best not in (None, stop):
            raise InputError(
                f"EarlyStopping looks at {stop['metric']}, and ModelCheckpoint at {best['metric']}",
                where=WHERE,
                expected="one metric by which a model is the best",
            )
    return found


def _early_stop(one: Any) -> dict[str, Any]:
    for name in ("min_delta", "stopping_threshold", "divergence_threshold", "_check_on_train_epoch_end"):
        if getattr(one, name, None):
            raise InputError(
                f"EarlyStopping({name.lstrip('_')}=...) is not offered", where=WHERE, remedy="patience alone"
            )
    return {"metric": one.monitor, "mode": one.mode, "patience": one.patience}


def _checkpoint(one: Any, before: Mapping[str, Any], epoch: Callable[[str], int]) -> dict[str, Any]:
    """Return the group `checkpoint`, given that of the ModelCheckpoint before it."""
    found = dict(before)
    if one.monitor is not None and one.save_top_k:
        best = {"metric": one.monitor, "mode": one.mode}
        if found.get("keep_best", best) != best:
            raise InputError(
                f"two ModelCheckpoint look at {found['keep_best']['metric']} and {one.monitor}",
                where=WHERE,
                expected="one metric by which a model is the best",
            )
        found["keep_best"] = best
    steps, epochs, seconds = one._every_n_train_steps, one._every_n_epochs, one._train_time_interval
    if seconds is not None:
        found["every_s"] = seconds.total_seconds()
    elif steps:
        found["every_steps"] = steps
    elif one.monitor is None and epochs:
        found["every_steps"] = epochs * epoch("ModelCheckpoint")
    if one.save_top_k > 1:
        found["keep"] = one.save_top_k
    elif one.save_top_k == -1:
        raise InputError("ModelCheckpoint(save_top_k=-1) is not offered", where=WHERE, remedy="save_top_k=10")
    return found


def trackers_of(logger: Any) -> tuple[list[str], list[str]]:
    """Return the trackers of a job, and the names of loggers of which a run writes the like itself."""
    loggers = [] if logger in (None, True, False) else list(logger) if isinstance(logger, (list, tuple)) else [logger]
    trackers, left = [], []
    for one in loggers:
        name = type(one).__name__
        if name in ("WandbLogger", "MLFlowLogger"):
            trackers.append(name.removesuffix("Logger").lower())
        elif name in ("TensorBoardLogger", "CSVLogger"):
            left.append(name)
        else:
            raise InputError(
                f"the logger {name} is not offered",
                where="Trainer(logger=...)",
                expected="WandbLogger, MLFlowLogger; TensorBoard's files are always written",
            )
    return trackers, left


class CallingModule(ParcelledModule):
    """Calls the script's callbacks, too, in the process that hears of a run."""

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """See `Task`: `on_train_batch_end`, and `on_train_epoch_end` before the first step of the next epoch."""
        heard = self._heard()
        if metrics["epoch"] > heard.current_epoch:
            self._call("on_train_epoch_end")
        heard.current_epoch, heard.global_step = metrics["epoch"], metrics["step"] + 1
        heard.callback_metrics |= {name: torch.tensor(float(value)) for name, value in metrics["metrics"].items()}
        self._call("on_train_batch_end", {"loss": torch.tensor(float(metrics["loss"]))}, None, metrics["step"])
        if metrics["step"] + 1 == self.run.total_steps:
            self._call("on_train_epoch_end")

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Task`: `on_validation_epoch_end` and `on_validation_end`."""
        heard = self._heard()
        heard.sanity_checking = step < 0
        heard.callback_metrics |= {name: torch.tensor(float(value)) for name, value in metrics.items()}
        for event in ("on_validation_epoch_end", "on_validation_end"):
            self._call(event)
        heard.sanity_checking = False

    def _heard(self) -> Any:
        if "heard" not in vars(self):
            vars(self)["heard"] = HeardTrainer(self._brought.facts.max_epochs)
        return vars(self)["heard"]

    def _call(self, event: str, *given: Any) -> None:
        module = Unknown("the module is not known where callbacks are called: {}", "log what they need in the module")
        for callback in self._brought.callbacks:
            if overrides(callback, event, "Callback"):
                getattr(callback, event)(self._heard(), module, *given)


class HeardTrainer:
    """What a script's callback sees as `trainer`."""

    def __init__(self, max_epochs: int | None) -> None:
        self.max_epochs = max_epochs
        self.current_epoch, self.global_step = 0, 0
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.sanity_checking = False
        self.is_global_zero = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(f"trainer.{name} is not known to a callback of a run", where=WHERE)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "should_stop":
            raise TaskError(
                "a callback of a run cannot stop it", where=WHERE, remedy="EarlyStopping, max_epochs, or raytrain stop"
            )
        super().__setattr__(name, value)
