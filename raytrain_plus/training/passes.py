"""The passes of a step: forward and backward over the microbatches of the hosted shards, up to the sums of gradients.

`Whole` makes them where a worker holds the whole model; `staged` where it holds a stage of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from raytrain_plus.collective.world import Work, World
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.parallel.data import Gradients
from raytrain_plus.parallel.pipeline.timeline import Bar
from raytrain_plus.state.named import dtype_name
from raytrain_plus.task import Task
from raytrain_plus.training import header
from raytrain_plus.training.buffers import Buffers
from raytrain_plus.training.control import Control
from raytrain_plus.training.fault_search import FaultSearch
from raytrain_plus.training.metrics import Figures, ShardBatches
from raytrain_plus.training.model import to_device
from raytrain_plus.training.randomness import LayerKeys
from raytrain_plus.training.verdict import Said


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers that a worker holds, and what a step collects of them: the model, or a chunk of it."""

    module: nn.Module
    parameters: Sequence[tuple[str, nn.Parameter]]
    """All of them; some may be frozen."""
    gradients: Gradients
    buffers: Buffers
    keys: LayerKeys

    def writes(self) -> list[int]:
        """How often each parameter has been written to."""
        return [value._version for _, value in self.parameters]

    def check_unchanged(self, before: Sequence[int]) -> None:
        """Raises `TrainingError` where a parameter was written to since."""
        now = self.writes()
        if now != before:
            changed = next(name for (name, _), a, b in zip(self.parameters, now, before, strict=True) if a != b)
            raise TrainingError(
                f"the loss changed the parameter '{changed}' in place, once for every microbatch: only a step may; "
                "a moving average belongs into a buffer (register_buffer), and an embedding can have no max_norm"
            )


class Passes(Protocol):
    """How a worker makes them."""

    @property
    def bars(self) -> Sequence[Bar]:
        """What a stage did when in the last step, in Unix seconds; nothing where there are no stages."""

    @property
    def chunks(self) -> Sequence[int]:
        """The number in the model of each of the parts that this worker holds."""

    def run(
        self,
        step: int,
        shards: Mapping[int, Sequence[Microbatch]],
        world: World,
        control: Control,
        flags: Callable[[], header.Flags],
        search: FaultSearch | None = None,
    ) -> list[Work]:
        """Leaves the shards' gradients and buffers in the parts, and the header, with the `flags` that this worker
        raises, in the first part's rider; the sums of both that it has started over `world`.

        `search` checks each shard's gradients before they are summed.
        """

    def figures(self, batches: ShardBatches, hosted: Sequence[int], control: Control) -> Figures:
        """What the held-out batches of the hosted shards give; the same on all stages of a cell."""

    def tied(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The gradients of all tied parameters of the cell, out of those that are held here."""

    def agree(self, step: int, said: Said, world: World, control: Control, wait_s: float) -> Said:
        """Return what all stages of the replica know of the step's sums, this one's being `said`.

        Comes back when every member of every stage's `world` is known to hold its sums.
        """


Shards = Mapping[int, Sequence[Microbatch]]
"""For each hosted shard, its microbatches of a step."""


@runtime_checkable
class Overlapping(Passes, Protocol):
    """Passes of several steps, of which some begin before others have ended."""

    def run_window(
        self,
        steps: range,
        counted: Callable[[int], Shards],
        batches: Callable[[int], Shards],
        control: Control,
        flags: Callable[[], header.Flags],
        end: Callable[[int, FaultSearch], None],
    ) -> None:
        """Makes the passes of these steps. `counted`: how many rows each microbatch of a step has; `batches`, asked for
        one step after the other where the data is read, has them. `end` is called when this worker's gradients of a
        step are complete, its header in the first part's rider, each of its shards checked."""

    def updating(self) -> AbstractContextManager[None]:
        """Open while the weights are changed in place."""


class Whole:
    """Shard after shard, microbatch after microbatch, on one worker; sums begin during the last backward pass."""

    def __init__(self, task: Task, part: Part, device: torch.device, shards: int) -> None:
        self.bars: Sequence[Bar] = ()
        self.chunks = (0,)
        self._task = task
        self._part = part
        self._device = device
        self._shards = shards

    def run(
        self,
        step: int,
        shards: Mapping[int, Sequence[Microbatch]],
        world: World,
        control: Control,
        flags: Callable[[], header.Flags],
        search: FaultSearch | None = None,
    ) -> list[Work]:
        """See `Passes`."""
        part = self._part
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
                        put_header(part.gradients, header.encode(reports, self._shards, flags()))
                    with part.buffers.swapped(seen):
                        if ends and search is None:
                            return part.gradients.reduce_during((loss * weight).backward, world, control.check)
                        (loss * weight).backward()
            if search is not None:
                search.shard_ended(shard, 0, part.parameters)
                if shard == last:
                    # They could not be checked once they are submitted.
                    return part.gradients.reduce_during(nothing, world, control.check)
            part.gradients.end_shard()
        raise AssertionError("a worker in a world hosts at least one shard with rows in every step")

    def figures(self, batches: ShardBatches, hosted: Sequence[int], control: Control) -> Figures:
        """See `Passes`."""
        found, part = Figures(), self._part
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

    def tied(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `Passes`: all are here."""
        return gradients

    def agree(self, step: int, said: Said, world: World, control: Control, wait_s: float) -> Said:
        """See `Passes`: this is the only stage, and a step that one replica has applied all others can copy."""
        return said

    def _loss(self, microbatch: Microbatch) -> tuple[torch.Tensor, float]:
        batch = on_device(microbatch.batch, self._device)
        return weighed(self._task, self._part.module, batch, microbatch.rows)


def nothing() -> None:
    """The backward passes have been made."""


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a copy of a batch where the model is.

    The step may be computed again from the same batch, and is to have the same bits then: a task that writes into its
    batch writes into a copy, which lies in memory alike wherever the rows came from.
    """
    return to_device(batch, device, copy=True)


def weighed(task: Task, model: nn.Module, batch: Any, rows: int) -> tuple[torch.Tensor, float]:
    """The task's mean loss of a batch, and its weight. Raises `TrainingError` where that is no single number."""
    result = task.loss(model, batch)
    loss, weight = result if isinstance(result, tuple) else (result, float(rows))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TrainingError(f"{type(task).__name__}.loss returned {shape}; expected a tensor with one value")
    return loss.reshape(()), float(weight)


def put_header(gradients: Gradients, encoded: Any) -> None:
    """Has an encoded header summed along with the gradients."""
    head = gradients.rider
    head.copy_(torch.from_numpy(header.to_digits(encoded, dtype_name(head.dtype))))
