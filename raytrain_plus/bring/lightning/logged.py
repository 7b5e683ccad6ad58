"""What `self.log` and `self.log_dict` are told: means of a step, and records from which an evaluation is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from raytrain_plus.bring.lightning.metric_objects import is_metric, value_of_step
from raytrain_plus.errors import TaskError
from raytrain_plus.training.passes.task_loss import TAKEN

_REDUCTIONS: Mapping[str, str] = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"}


@dataclass(frozen=True, slots=True)
class LoggedValue:
    """One value under one name."""

    value: Any
    """A tensor of one number, or a metric of torchmetrics."""
    on_step: bool
    on_epoch: bool
    reduction: str
    rows: int | None
    """What the value counts in a mean; None for the rows of the batch."""


class LogBook:
    """Takes what a module logs in one hook of one batch, or after an evaluation."""

    __slots__ = ("_default_on_step", "values")

    def __init__(self, *, on_step: bool) -> None:
        """`on_step`: whether values are of the step unless the module says so; else they are of the epoch."""
        self.values: dict[str, LoggedValue] = {}
        self._default_on_step = on_step

    def log(
        self,
        name: str,
        value: Any,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        batch_size: int | None = None,
    ) -> None:
        """Take a value. Raises `TaskError` for one that is no single number, and for reductions that a run lacks."""
        if not isinstance(name, str) or not name:
            raise TaskError(f"self.log got the name {name!r}", where="LightningModule", expected="text")
        if not is_metric(value):
            value = _number(name, value)
        step = self._default_on_step if on_step is None else on_step
        epoch = not self._default_on_step if on_epoch is None else on_epoch
        if not step and not epoch:
            # So does Lightning.
            return
        self.values[name] = LoggedValue(value, step, epoch, _reduction(name, reduce_fx), batch_size)

    def log_dict(self, dictionary: Any, **given: Any) -> None:
        """Take several values, or a collection of metrics."""
        items = dictionary.items(copy_state=False) if is_metric(dictionary, "MetricCollection") else dictionary.items()
        for name, value in items:
            self.log(name, value, **given)

    def of_step(self) -> dict[str, Any]:
        """Return the means that a step reports of one microbatch, by the names of Lightning.

        `x_step` for what is of the step and of the epoch, `x_epoch` for what is of the epoch alone.
        """
        found = {}
        for name, one in self.values.items():
            if one.on_epoch and one.reduction != "mean":
                raise TaskError(
                    f"self.log('{name}', reduce_fx='{one.reduction}') of training rows is not offered",
                    where="LightningModule.training_step",
                    remedy="leave out on_epoch=True, or log it in validation_step",
                )
            said = f"{name}_step" if one.on_step and one.on_epoch else f"{name}_epoch" if one.on_epoch else name
            value = value_of_step(one.value) if is_metric(one.value) else one.value
            found[f"logged_{said}" if said in TAKEN else said] = _number(name, value)
        return found

    def record(self, metrics: Mapping[str, object]) -> dict[str, Any]:
        """Return the values of a held-out batch as plain data. `metrics`: those of the module, by name."""
        places = {id(one): name for name, one in metrics.items()}
        return {
            name: {
                "value": None if is_metric(one.value) else float(one.value),
                "metric": _place(name, one.value, places) if is_metric(one.value) else None,
                "forked": one.on_step and one.on_epoch,
                "reduction": one.reduction,
                "rows": one.rows,
            }
            for name, one in self.values.items()
        }


def reduced(records: Sequence[tuple[int, Mapping[str, Any]]], metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of an evaluation. `records`: for each batch, its rows, and what `LogBook.record` returned.

    `metrics`: the metrics by their names in the module, which have counted all batches.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for _, record in records for name in record):
        every = [(rows, record[name]) for rows, record in records if name in record]
        last = every[-1][1]
        if last["metric"] is not None:
            value = float(_number(name, metrics[last["metric"]].compute()))
        else:
            weights = [rows if one["rows"] is None else one["rows"] for rows, one in every]
            value = _reduce(last["reduction"], [one["value"] for _, one in every], weights)
        found[name] = value
        if last["forked"]:
            found[f"{name}_epoch"] = value
    return found


def _reduce(how: str, values: Sequence[float], weights: Sequence[int]) -> float:
    if how == "mean":
        total = sum(weights)
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0
    return float(sum(values)) if how == "sum" else min(values) if how == "min" else max(values)


def _place(name: str, metric: object, places: Mapping[int, str]) -> str:
    if id(metric) not in places:
        raise TaskError(
            f"self.log('{name}') got a metric that is no attribute of the module",
            where="LightningModule",
            expected="a metric that __init__ has made",
        )
    return places[id(metric)]


def _reduction(name: str, given: Any) -> str:
    how = given if isinstance(given, str) else getattr(given, "__name__", "")
    if how not in _REDUCTIONS:
        raise TaskError(
            f"self.log('{name}', reduce_fx={how or given!r}) is not offered",
            where="LightningModule",
            expected="mean, sum, min or max",
        )
    return _REDUCTIONS[how]


def _number(name: str, value: Any) -> torch.Tensor:
    """Return a value as a tensor of one number. Raises `TaskError` for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(())
    if isinstance(value, (Number, int, float)) and not isinstance(value, complex):
        return torch.tensor(float(value))  # type: ignore[arg-type]
    shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise TaskError(
        f"self.log('{name}') got {shape}",
        where="LightningModule",
        expected="one number: a metric's own mean, or each value under a name of its own with self.log_dict",
    )
