"""Metrics of held-out batches: summed over the rows of each shard, or kept for each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TrainingError

ShardBatches = Callable[[int], Iterable[Microbatch]]
"""Returns the microbatches of one shard's span of the held-out rows, in order."""
Outputs = Mapping[str, torch.Tensor]
"""Values of rows, by name; the first dimension is the rows."""


class Means(NamedTuple):
    """The metrics of a held-out batch."""

    numbers: Mapping[str, float]
    """Means over the batch, which count with its weight."""
    of_rows: Mapping[str, float]
    """Means of what was given for each row, which count with the rows."""
    weight: float
    """The batch's weight: its rows, its tokens if `data.collate` packs them, or the number that the task returns."""


class MetricSums:
    """Sums of the values that `Task.evaluate` returns, weighted by what they count, and the values of rows."""

    def __init__(self) -> None:
        self.names: list[str] | None = None
        self.by_shard: dict[int, dict[str, tuple[float, float]]] = {}
        """For each shard, by metric name, the weighted sum and what it is divided by."""
        self.rows: dict[int, int] = {}
        self.skipped: dict[int, int] = {}
        """The rows of each shard that were left out (`data.on_error: skip`)."""
        self.outputs: dict[int, list[Outputs]] = {}
        """The values of each shard's rows, by batch, for `Task.summarise`; only where the loss is computed."""

    def begin(self, shard: int) -> None:
        """Begin a shard, which may have no rows."""
        self.by_shard.setdefault(shard, {})
        self.rows.setdefault(shard, 0)
        self.skipped.setdefault(shard, 0)

    def add(self, shard: int, rows: int, means: Means) -> None:
        """Add the means of a batch of `rows` rows; a batch of weight 0 has only names.

        Raises `TrainingError` if they have other names than those of other batches.
        """
        names = sorted({*means.numbers, *means.of_rows})
        if self.names is not None and names != self.names:
            one, other = ", ".join(self.names) or "none", ", ".join(names) or "none"
            raise TrainingError(f"evaluate returned different metrics for different batches: {one}, and {other}")
        self.names = names
        self.begin(shard)
        for values, weight in ((means.numbers, means.weight), (means.of_rows, float(rows))):
            for name, value in values.items() if weight else ():
                total, divisor = self.by_shard[shard].get(name, (0.0, 0.0))
                self.by_shard[shard][name] = total + value * weight, divisor + weight
        self.rows[shard] += rows


def checked(
    returned: Any, rows: int, summarised: bool, weight: float, by_token: bool = False
) -> tuple[Means, dict[str, torch.Tensor]]:
    """Return the means of a batch, and the values of its rows on the CPU, given what `evaluate` returned.

    `summarised`: whether the task has a `summarise`; without it the values of rows are averaged. `weight`: what the
    batch counts unless the task says so. `by_token`: whether means are over tokens, so that values of several rows
    cannot be averaged. Raises `TrainingError` if the metrics are not a dict of numbers and of tensors over rows.
    """
    metrics, weight = _weighted(returned, weight)
    if not isinstance(metrics, Mapping):
        raise TrainingError(
            f"evaluate returned {type(metrics).__name__}; expected a dict of name -> mean over the batch, or value of "
            "each row"
        )
    found, of_rows, outputs = dict[str, float](), dict[str, float](), dict[str, torch.Tensor]()
    for name, value in metrics.items():
        by_row = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows
        if by_row and summarised:
            outputs[str(name)] = value.detach().cpu().contiguous()
        elif by_row and value.dim() == 1:
            if by_token and rows > 1:
                raise TrainingError(
                    f"evaluate returned '{name}', a value for each row, and with data.collate: pack metrics are means "
                    "over tokens: return one number, or define Task.summarise"
                )
            # Packed, a single row counts its tokens.
            (found if by_token else of_rows)[str(name)] = float(value.detach().to("cpu", torch.float64).mean())
        else:
            found[str(name)] = _number(str(name), value, rows)
    return Means(found, of_rows, weight), outputs


def _weighted(returned: Any, weight: float) -> tuple[Any, float]:
    """Return the metrics of a batch and what it counts, which is `weight` unless the task says so."""
    if not isinstance(returned, Mapping) or returned.keys() != {"metrics", "weight"}:
        return returned, weight
    if not isinstance(returned["metrics"], Mapping):
        # Metrics of these names.
        return returned, weight
    try:
        given = float(returned["weight"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError("evaluate returned a weight that is not a single number") from error
    if not 0 <= given < math.inf:
        raise TrainingError(f"evaluate returned a weight of {given}; expected 0 or a positive number")
    return returned["metrics"], given


def numbers(metrics: Any) -> dict[str, float]:
    """Return what `summarise` returned as floats. Raises `TrainingError` if it is not a dict of numbers."""
    if not isinstance(metrics, Mapping):
        raise TrainingError(f"summarise returned {type(metrics).__name__}; expected a dict of name -> number")
    return {str(name): _number(str(name), value, None) for name, value in metrics.items()}


def _number(name: str, value: Any, rows: int | None) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
        if rows is None:
            raise TrainingError(f"summarise returned '{name}', of {shape}, which is not a single number") from error
        raise TrainingError(
            f"evaluate returned '{name}', of {shape}, which is not a single number, nor one for each of the batch's "
            f"{rows} rows; values of several dimensions need a Task.summarise"
        ) from error
