"""The passes of a step: forward and backward over the microbatches of the hosted shards, up to the gradient sums.

`Whole` runs them on a worker that holds the whole model; `staged` on a worker that holds one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from raytrain_plus.collective.world import Work
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.parallel.data import Gradients
from raytrain_plus.parallel.pipeline.timeline import Bar
from raytrain_plus.state.named import dtype_name
from raytrain_plus.task import Task
from raytrain_plus.training import header
from raytrain_plus.training.context import StepContext
from raytrain_plus.training.fault_search import FaultSearch
from raytrain_plus.training.metric_sums import MetricSums, ShardBatches
from raytrain_plus.training.model import to_device
from raytrain_plus.training.part import ModelPart
from raytrain_plus.training.verdict import SumStatus

Shards = Mapping[int, Sequence[Microbatch]]
"""For each hosted shard, its microbatches of a step."""


class ReplicaPasses(Protocol):
    """What the passes of a step are to a worker, whether steps overlap or not."""

    @property
    def bars(self) -> Sequence[Bar]:
        """The last step's actions of a stage, in Unix seconds; empty if the model has no stages."""

    @property
    def chunks(self) -> Sequence[int]:
        """The index in the model of each part that this worker holds."""

    def metric_sums(self, batches: ShardBatches, hosted: Sequence[int], context: StepContext) -> MetricSums:
        """Return the metrics of the held-out batches of the hosted shards; the same on all stages of a replica."""

    def exchange_tied(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the gradients of all tied parameters of the model replica, given those held here."""

    def agree(self, step: int, status: SumStatus, context: StepContext) -> SumStatus:
        """Return what all stages of the replica know of the step's sums; `status` is this stage's knowledge.

        Returns once every member of every stage's world is known to hold its sums.
        """


class Passes(ReplicaPasses, Protocol):
    """The passes of one step after the other."""

    def run(self, step: int, shards: Shards, context: StepContext, search: FaultSearch | None = None) -> list[Work]:
        """Run the passes and return the sums started over the context's world.

        Leaves the shards' gradients and buffers in the parts. Leaves the header, with the flags that this worker
        raises, in the first part's rider. `search` checks each shard's gradients before they are summed.
        """


@runtime_checkable
class Overlapping(ReplicaPasses, Protocol):
    """Passes of several overlapping steps: a step can begin before the previous one has ended."""

    def run_window(
        self,
        steps: range,
        counted: Callable[[int], Shards],
        batches: Callable[[int], Shards],
        context: StepContext,
        end: Callable[[int, FaultSearch], None],
    ) -> None:
        """Run the passes of these steps.

        `counted` returns the number of rows of each microbatch of a step. `batches` returns the microbatches; it is
        called once per step, in order, on the stage that reads the data. `end` is called when this worker's gradients
        of a step are complete, the header is in the first part's rider, and each shard is checked.
        """

    def updating(self) -> AbstractContextManager[None]:
        """Context in which the weights are changed in place."""


class Whole:
    """The passes on one worker: shard by shard, microbatch by microbatch; sums start during the last backward pass."""

    def __init__(self, task: Task, part: ModelPart, device: torch.device, shards: int) -> None:
        self.bars: Sequence[Bar] = ()
        self.chunks = (0,)
        self._task = task
        self._part = part
        self._device = device
        self._shards = shards

    def run(
        self,
        step: int,
        shards: Shards,
        context: StepContext,
        search: FaultSearch | None = None,
    ) -> list[Work]:
        """See `Passes`."""
        part, control = self._part, context.control
        before = part.writes()
        reports: dict[int, header.ShardReport] = {}
        last = max(shards, default=-1)
        for shard in sorted(shards):
            part.buffers.restore()
            report = header.ShardReport(shards[shard][0].start)
            for index, microbatch in enumerate(shards[shard]):
                control.check()
                control.enter("computing")
                with part.keys.microbatch(step, shard, index) as keyed:
                    loss, weight = self._loss(microbatch)
                    report = report.plus(microbatch.rows, microbatch.ids, weight, float(loss.detach()))
                    if index + 1 == len(shards[shard]):
                        reports[shard] = report
                        part.buffers.end_shard(shard, report.rows)
                    part.check_unchanged(before)
                    seen = part.buffers.seen()
                    keyed.backward()
                    ends = shard == last and index + 1 == len(shards[shard])
                    if ends:
                        put_header(part.gradients, header.encode(reports, self._shards, context.flags()))
                    with part.buffers.swapped(seen):
                        if ends and search is None:
                            return part.gradients.reduce_during((loss * weight).backward, context.world, control.check)
                        (loss * weight).backward()
            if search is not None:
                search.shard_ended(shard, 0, part.parameters)
                if shard == last:
                    # Gradients cannot be checked after they are submitted.
                    return part.gradients.reduce_during(no_backward, context.world, control.check)
            part.gradients.end_shard()
        raise AssertionError("a worker in a world hosts at least one shard with rows in every step")

    def metric_sums(self, batches: ShardBatches, hosted: Sequence[int], context: StepContext) -> MetricSums:
        """See `ReplicaPasses`."""
        found, part, control = MetricSums(), self._part, context.control
        for shard in hosted:
            part.buffers.restore()
            found.begin(shard)
            for index, microbatch in enumerate(batches(shard)):
                control.check()
                control.enter("computing")
                with part.keys.microbatch("evaluate", shard, index):
                    given = self._task.evaluate(part.module, to_device(microbatch.batch, self._device))
                found.add(shard, microbatch.rows, given)
        return found

    def exchange_tied(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `ReplicaPasses`: all of them are on this worker."""
        return gradients

    def agree(self, step: int, status: SumStatus, context: StepContext) -> SumStatus:
        """See `ReplicaPasses`: this is the only stage; other replicas can copy a step that one replica has applied."""
        return status

    def _loss(self, microbatch: Microbatch) -> tuple[torch.Tensor, float]:
        batch = on_device(microbatch.batch, self._device)
        return weighted_loss(self._task, self._part.module, batch, microbatch.rows)


def no_backward() -> None:
    """Stand in for the last backward pass, which has already run."""


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a copy of a batch on the model's device.

    The step may be recomputed from the same batch and must give the same bits. A task that writes into its batch writes
    into a copy, whose memory layout does not depend on the source of the rows.
    """
    return to_device(batch, device, copy=True)


def weighted_loss(task: Task, model: nn.Module, batch: Any, rows: int) -> tuple[torch.Tensor, float]:
    """Return the task's mean loss of a batch and its weight.

    Raises `TrainingError` if the loss is not a single number.
    """
    result = task.loss(model, batch)
    loss, weight = result if isinstance(result, tuple) else (result, float(rows))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TrainingError(f"{type(task).__name__}.loss returned {shape}; expected a tensor with one value")
    return loss.reshape(()), float(weight)


def put_header(gradients: Gradients, encoded: Any) -> None:
    """Put an encoded header into the rider, to be summed with the gradients."""
    head = gradients.rider
    head.copy_(torch.from_numpy(header.to_digits(encoded, dtype_name(head.dtype))))
