"""Metrics of held-out batches, summed over the rows of each shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import TrainingError

ShardBatches = Callable[[int], Iterable[Microbatch]]
"""Returns the microbatches of one shard's span of the held-out rows, in order."""


class MetricSums:
    """Sums of the values that `Task.evaluate` returns, weighted by rows."""

    def __init__(self) -> None:
        self.names: list[str] | None = None
        self.by_shard: dict[int, dict[str, float]] = {}
        """The weighted sums of each shard, by metric name."""
        self.rows: dict[int, int] = {}

    def begin(self, shard: int) -> None:
        """Begin a shard, which may have no rows."""
        self.by_shard.setdefault(shard, {})
        self.rows.setdefault(shard, 0)

    def add(self, shard: int, rows: int, metrics: Any) -> None:
        """Add the values of a batch. Raises `TrainingError` if they are not a dict of numbers, or have other names."""
        given = checked(metrics)
        if self.names is not None and sorted(given) != self.names:
            one, other = ", ".join(self.names) or "none", ", ".join(sorted(given)) or "none"
            raise TrainingError(f"evaluate returned different metrics for different batches: {one}, and {other}")
        self.names = sorted(given)
        self.begin(shard)
        sums = self.by_shard[shard]
        for name, value in given.items():
            sums[name] = sums.get(name, 0.0) + value * rows
        self.rows[shard] += rows


def checked(metrics: Any) -> dict[str, float]:
    """Return the metrics as floats. Raises `TrainingError` if they are not a dict of numbers."""
    if not isinstance(metrics, Mapping):
        raise TrainingError(
            f"evaluate returned {type(metrics).__name__}; expected a dict of name -> mean over the batch"
        )
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"evaluate returned a metric that is not a single number: {error}") from error
