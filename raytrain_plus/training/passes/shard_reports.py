"""What the passes of a step tell of each shard: losses and metrics stay on their device until all of them are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.device_copies import Numbers, read_together
from raytrain_plus.training.exchange.header import Flags, ShardReport, encode
from raytrain_plus.training.exchange.step_metrics import OwnMetrics, differing, own_metrics

Number = float | torch.Tensor
"""A number of the host, or a detached tensor without dimensions."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a microbatch adds to the report of its shard."""

    shard: int
    rows: int
    ids: int
    weight: float | Numbers
    loss: Numbers
    metrics: Mapping[str, float | Numbers]


class ShardReports:
    """The reports of the shards of a step whose losses are computed here."""

    def __init__(self, begun: Mapping[int, ShardReport] | None = None) -> None:
        """`begun`: what is known of shards before their first forward pass."""
        self._reports = dict(begun or {})
        self._told: list[_Told] = []
        self._names: dict[int, frozenset[str]] = {}

    def add(
        self,
        step: int,
        shard: int,
        microbatch: Microbatch,
        loss: torch.Tensor,
        weight: Number,
        metrics: Mapping[str, Number],
    ) -> None:
        """Add a microbatch: its mean loss, its weight, and its mean metrics.

        Raises `TrainingError` if the metrics have other names than those of the shard before.
        """
        names = frozenset(metrics)
        if self._names.setdefault(shard, names) != names:
            raise differing(step, shard, "before")
        self._reports.setdefault(shard, ShardReport(microbatch.start))
        # The task may change its tensors before they are read.
        kept = {name: _kept(value) for name, value in metrics.items()}
        told = _Told(shard, microbatch.rows, microbatch.ids, _kept(weight), Numbers(loss.detach().clone()), kept)
        self._told.append(told)

    @property
    def unread(self) -> list[Numbers]:
        """What `read` reads."""
        found = [number for told in self._told for number in (told.loss, told.weight, *told.metrics.values())]
        return [number for number in found if isinstance(number, Numbers)]

    def weight(self) -> float | None:
        """Return the weight of all shards here, in their order; None if it must be read."""
        weights = dict.fromkeys(self._reports, 0.0)
        for told in self._told:
            if isinstance(told.weight, Numbers):
                return None
            weights[told.shard] += told.weight
        # As the header adds it: over the microbatches of each shard, then over the shards.
        return sum(weights[shard] for shard in sorted(weights))

    def encoded(self, shards: int, flags: Flags) -> tuple[npt.NDArray[np.int64], OwnMetrics]:
        """Return the header of a step of a job with so many shards, and the metrics that go with it."""
        read = self.read()
        own = own_metrics({shard: report.metrics for shard, report in read.items()}, shards)
        return encode(read, shards, flags), own

    def read(self) -> dict[int, ShardReport]:
        """Return the reports."""
        read_together(self.unread)
        found = dict(self._reports)
        for told in self._told:
            metrics = {name: _value(value) for name, value in told.metrics.items()}
            found[told.shard] = found[told.shard].plus(
                told.rows, told.ids, _value(told.weight), _value(told.loss), metrics
            )
        return found


def _kept(value: Number) -> float | Numbers:
    return Numbers(value.clone()) if isinstance(value, torch.Tensor) else value


def _value(value: float | Numbers) -> float:
    if isinstance(value, Numbers):
        [value] = value.values()
    return value
