"""Metrics of held-out batches: summed over the rows of each shard, or kept for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from raytrain_plus.data.microbatches import Microbatch
from raytrain_plus.errors import TrainingError

ShardBatches = Callable[[int], Iterable[Microbatch]]
"""Returns the microbatches of one shard's span of the held-out rows, in order."""
Outputs = Mapping[str, torch.Tensor]
"""Values of rows, by name; the first dimension is the rows."""


class MetricSums:
    """Sums of the values that `Task.evaluate` returns, weighted by rows or tokens, and the values of rows."""

    def __init__(self) -> None:
        self.names: list[str] | None = None
        self.by_shard: dict[int, dict[str, float]] = {}
        """The weighted sums of each shard, by metric name."""
        self.rows: dict[int, int] = {}
        self.skipped: dict[int, int] = {}
        """The rows of each shard that were left out (`data.on_error: skip`)."""
        self.weights: dict[int, float] = {}
        """What the sums of each shard are divided by: its rows, or its tokens if `data.collate` packs them."""
        self.outputs: dict[int, list[Outputs]] = {}
        """The values of each shard's rows, by batch, for `Task.summarise`; only where the loss is computed."""

    def begin(self, shard: int) -> None:
        """Begin a shard, which may have no rows."""
        self.by_shard.setdefault(shard, {})
        self.rows.setdefault(shard, 0)
        self.skipped.setdefault(shard, 0)
        self.weights.setdefault(shard, 0.0)

    def add(self, shard: int, rows: int, metrics: Mapping[str, float], weight: float | None = None) -> None:
        """Add the means of a batch, which counts with `weight`, by default its rows.

        Raises `TrainingError` if they have other names than those of other batches.
        """
        if self.names is not None and sorted(metrics) != self.names:
            one, other = ", ".join(self.names) or "none", ", ".join(sorted(metrics)) or "none"
            raise TrainingError(f"evaluate returned different metrics for different batches: {one}, and {other}")
        self.names = sorted(metrics)
        self.begin(shard)
        sums, weight = self.by_shard[shard], float(rows) if weight is None else weight
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value * weight
        self.rows[shard] += rows
        self.weights[shard] += weight


def checked(
    metrics: Any, rows: int, summarised: bool, by_token: bool = False
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the means of a batch, and the values of its rows on the CPU.

    `summarised`: whether the task has a `summarise`; without it the values of rows are averaged. `by_token`: whether
    means are over tokens, so that values of several rows cannot be averaged. Raises `TrainingError` if the metrics are
    not a dict of numbers and of tensors over rows.
    """
    if not isinstance(metrics, Mapping):
        raise TrainingError(
            f"evaluate returned {type(metrics).__name__}; expected a dict of name -> mean over the batch, or value of "
            "each row"
        )
    means, outputs = dict[str, float](), dict[str, torch.Tensor]()
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
            means[str(name)] = float(value.detach().to("cpu", torch.float64).mean())
        else:
            means[str(name)] = _number(str(name), value, rows)
    return means, outputs


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
