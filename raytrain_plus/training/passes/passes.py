"""The passes of a step: forward and backward over the microbatches of the hosted shards, up to the gradient sums.

`synchronous` runs them; `pipedream` runs those of overlapping steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from typing_extensions import override

from raytrain_plus.collective.world import Work
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.device_copies import Numbers
from raytrain_plus.parallel.pipeline.timeline import Bar
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.step_metrics import OwnMetrics
from raytrain_plus.training.exchange.verdict import SumStatus
from raytrain_plus.training.passes.metric_sums import MetricSums, ShardBatches
from raytrain_plus.training.update.fault_search import FaultSearch

Shards = Mapping[int, Sequence[Microbatch]]
"""For each hosted shard, its microbatches of a step."""


class ReplicaPasses(Protocol):
    """Interface of a step's passes, whether steps overlap or not."""

    @property
    def bars(self) -> Sequence[Bar]:
        """The last step's actions of a stage, in Unix seconds; empty if the model has no stages."""

    @property
    def chunks(self) -> Sequence[int]:
        """The index in the model of each part that this worker holds."""

    metrics: OwnMetrics
    """The metrics of the replica's shards in the step whose header is in the first part's rider."""

    def metric_sums(self, batches: ShardBatches, hosted: Sequence[int], context: StepContext) -> MetricSums:
        """Return the metrics of the held-out batches of the hosted shards; the same on all stages of a replica."""

    @property
    def is_last(self) -> bool:
        """Whether this worker computes the loss."""

    def share_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics given by the stage that computes the loss; every stage calls it."""

    def exchange_tied(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the gradients of all tied parameters of the model replica, given those held here."""

    def agree(self, step: int, status: SumStatus, context: StepContext) -> SumStatus:
        """Return what all stages of the replica know of the step's sums; `status` is this stage's knowledge.

        Returns once every member of every stage's world is known to hold its sums.
        """


class OneWorker(ReplicaPasses):
    """Those of a replica of one worker, which has nobody to exchange anything with."""

    is_last = True

    @override
    def share_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return metrics

    @override
    def exchange_tied(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return gradients


class Passes(ReplicaPasses, Protocol):
    """The passes of one step after the other."""

    @property
    def weight(self) -> float | None:
        """The weight of the shards in the step that was run last; None if it must be read from the device first."""

    @property
    def unread(self) -> Sequence[Numbers]:
        """What must be read of that step's passes, besides its sums."""

    def run(self, step: int, shards: Shards, context: StepContext, search: FaultSearch | None = None) -> list[Work]:
        """Run the passes and return the sums started over the context's world.

        Leaves the shards' gradients and buffers in the parts. Leaves the header, with the flags that this worker
        raises, in the first part's rider. `search` checks each shard's gradients before they are summed.
        """


Ended = Callable[[int, FaultSearch, list[Work]], None]
"""Ends a step: called with its number, a search that has checked each shard, and the sums that are under way."""


class Overlapping(ReplicaPasses, Protocol):
    """Passes of several overlapping steps: a step can begin before the previous one has ended."""

    def run_window(
        self,
        steps: range,
        counted: Callable[[int], Shards],
        batches: Callable[[int], Shards],
        context: StepContext,
        end: Ended,
    ) -> None:
        """Run the passes of these steps.

        `counted` returns the number of rows of each microbatch of a step. `batches` returns the microbatches; it is
        called once per step, in order, on the stage that reads the data. `end` is called when this worker's gradients
        of a step are complete, and the header in the first part's rider.
        """

    def updating(self) -> AbstractContextManager[None]:
        """Context in which the weights are changed in place."""
