"""A model replica of one worker, which has nobody to exchange anything with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from typing_extensions import override

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.device_copies import BatchCopies, to_device
from raytrain_plus.parallel.pipeline.chunk import Objective
from raytrain_plus.state.holding import MEAN_LOSS, WEIGHTED
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import encode
from raytrain_plus.training.exchange.step_metrics import OwnMetrics, own_metrics
from raytrain_plus.training.exchange.thread_control import RowSpan
from raytrain_plus.training.passes.passes import ReplicaPasses
from raytrain_plus.training.passes.shard_reports import ShardReports
from raytrain_plus.training.passes.task_loss import held_out_metrics, objective
from raytrain_plus.training.update.train_state import TrainState


class OneWorker(ReplicaPasses):
    """See the module docstring; `WholePasses` and `ByLayer` add the passes."""

    is_last = True

    def __init__(self, state: TrainState) -> None:
        """Prepare for the passes of the model that `state` is of."""
        self.metrics = OwnMetrics()
        self._task, self._device, self._rules = state.task, state.device, state.rules
        self._sums, self._rider, self._shards = state.sums, state.sums.rider, state.shards
        self._on_device = BatchCopies(state.device)

    def _objective(self, model: nn.Module, one: Microbatch, place: RowSpan, reports: ShardReports) -> Objective:
        """See `task_loss.objective`."""
        factor, mean = self._sums.loss_factor, self._rules[MEAN_LOSS]
        return objective(self._task, model, one, place, self._on_device, reports, factor, mean=mean)

    def _evaluated(self, model: nn.Module, batch: Any, rows: int, *, copy: bool = False) -> Any:
        """See `task_loss.held_out_metrics`. `copy`: whether the task gets tensors that it may change."""
        given = to_device(batch, self._device, copy=copy)
        return held_out_metrics(self._task, model, given, rows, weighted=self._rules[WEIGHTED])

    def _encoded(self, reports: ShardReports, context: StepContext) -> npt.NDArray[np.int64]:
        """Return the header, and fill the metrics that go with it."""
        read = reports.read()
        own = own_metrics({shard: report.metrics for shard, report in read.items()}, self._shards)
        self.metrics.names, self.metrics.sums = own.names, own.sums
        return encode(read, self._shards, context.flags())

    @override
    def share_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return metrics

    @override
    def exchange_tied(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return gradients
