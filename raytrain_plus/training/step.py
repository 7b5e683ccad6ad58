"""One step is one transaction: everything is summed first, and only then does anything change.

each hosted shard, in order
    committed buffers back -> each microbatch: keys set, forward, weighted backward
last backward of all:  header submitted -> backward, buckets submitted as they fill
all sums there -> checked -> divided by the weight -> clipped -> optimizer, scheduler, buffers    = applied
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from raytrain_plus.collective.world import Work, World, wait
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.parallel.data import Gradients, square_norm
from raytrain_plus.task import Task
from raytrain_plus.training import header
from raytrain_plus.training.buffers import Buffers
from raytrain_plus.training.model import Built, to_device
from raytrain_plus.training.randomness import LayerKeys


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A step that changed the state."""

    step: int
    rows: int
    loss: float
    seconds: float
    """From the batch in hand to the state changed."""
    stop: bool
    """Somebody wished to stop at this boundary."""


class Stepper:
    """Holds a model's training state and moves it step by step."""

    def __init__(
        self, task: Task, built: Built, *, seed: int, shards: int, clip_norm: float | None, device: torch.device
    ) -> None:
        self.task = task
        self.module = built.module
        self.named = [(name, value) for name, value in built.module.named_parameters() if value.requires_grad]
        self.optimizer = task.optimizer(self.named)
        self.scheduler = task.scheduler(self.optimizer)
        self.gradients = Gradients([value for _, value in self.named])
        self.buffers = Buffers(built.module, task)
        self.keys = LayerKeys(built.module, built.layers, seed)
        self.device = device
        self._shards = shards
        self._clip_norm = clip_norm

    def run(
        self,
        step: int,
        shards: Mapping[int, Sequence[Microbatch]],
        world: World,
        *,
        wishes_stop: bool,
        timeout_s: float,
        interrupted: Callable[[], bool],
    ) -> Applied:
        """Makes step `step` over the microbatches of the hosted `shards`, together with the world's other members.

        Raises `TrainingError` where a loss is not finite (before anything changed) and `Interrupted` or `WaitExpired`
        where the world breaks.
        """
        start = time.monotonic()
        self.module.train()
        works, head = self._forward_backward(step, shards, world, wishes_stop)
        for name, work in works:
            wait(work, f"the sum of {name} in step {step}", timeout_s, interrupted)
        totals = header.decode(head.numpy())
        if totals.bad_shards:
            raise TrainingError(_not_finite(step, totals.bad_shards))
        self._apply(step, totals, world, timeout_s, interrupted)
        return Applied(
            step=step, rows=totals.rows, loss=totals.loss, seconds=time.monotonic() - start, stop=totals.stop
        )

    def _forward_backward(
        self, step: int, shards: Mapping[int, Sequence[Microbatch]], world: World, wishes_stop: bool
    ) -> tuple[list[tuple[str, Work]], torch.Tensor]:
        self.gradients.zero()
        self.buffers.begin_step()
        reports: dict[int, header.ShardReport] = {}
        last = max(shards, default=-1)
        for shard in sorted(shards):
            self.buffers.begin_shard()
            rows, weight_sum, loss_sum = 0, 0.0, 0.0
            for index, microbatch in enumerate(shards[shard]):
                with self.keys.microbatch(step, shard, index):
                    loss, weight = self._loss(microbatch)
                    rows += microbatch.rows
                    weight_sum += weight
                    loss_sum += float(loss.detach()) * weight
                    if shard != last or index + 1 != len(shards[shard]):
                        (loss * weight).backward()
                        continue
                    reports[shard] = header.ShardReport(rows, weight_sum, loss_sum)
                    self.buffers.end_shard(shard, rows)
                    return self._last_backward(loss * weight, reports, world, wishes_stop)
            reports[shard] = header.ShardReport(rows, weight_sum, loss_sum)
            self.buffers.end_shard(shard, rows)
        raise AssertionError("a worker in a world hosts at least one shard with rows in every step")

    def _last_backward(
        self, loss: torch.Tensor, reports: dict[int, header.ShardReport], world: World, wishes_stop: bool
    ) -> tuple[list[tuple[str, Work]], torch.Tensor]:
        # Submitted first, so that its round trip hides behind the backward pass.
        head = torch.from_numpy(header.encode(reports, self._shards, wishes_stop))
        works = [("the header", world.reduce(head, "header"))]
        gradients = self.gradients.reduce_during(loss.backward, world)
        works += [(f"gradient bucket {index}", work) for index, work in enumerate(gradients)]
        return works, head

    def _loss(self, microbatch: Microbatch) -> tuple[torch.Tensor, float]:
        result = self.task.loss(self.module, to_device(microbatch.batch, self.device))
        loss, weight = result if isinstance(result, tuple) else (result, float(microbatch.rows))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TrainingError(f"{type(self.task).__name__}.loss returned {shape}; expected a tensor with one value")
        return loss.reshape(()), float(weight)

    def _apply(
        self, step: int, totals: header.StepTotals, world: World, timeout_s: float, interrupted: Callable[[], bool]
    ) -> None:
        sums, maxima = self._reduce_buffers(step, world, timeout_s, interrupted)
        self.gradients.scale(1.0 / totals.weight)
        if self._clip_norm is not None:
            self._clip(step, self._clip_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.buffers.commit(sums, maxima, totals.rows)

    def _reduce_buffers(
        self, step: int, world: World, timeout_s: float, interrupted: Callable[[], bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not len(self.buffers):
            return None, None
        sums, maxima = self.buffers.to_reduce()
        works = []
        if sums is not None:
            works.append(world.reduce(sums, "buffers.sum"))
        if maxima is not None:
            works.append(world.reduce(maxima, "buffers.max", "max"))
        for work in works:
            wait(work, f"the buffers of step {step}", timeout_s, interrupted)
        return sums, maxima

    def _clip(self, step: int, limit: float) -> None:
        norm = math.sqrt(square_norm([(name, _gradient(value)) for name, value in self.named]))
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient of step {step} is not finite (norm {norm}), though its loss is")
        if norm > limit:
            self.gradients.scale(limit / (norm + 1e-6))


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "gradients are views into buckets and never None"
    return parameter.grad


def _not_finite(step: int, shards: Sequence[int]) -> str:
    which = f"shard {shards[0]}" if len(shards) == 1 else f"shards {', '.join(map(str, shards))}"
    return (
        f"the loss of step {step} is not finite in {which}; nothing of this step was applied. "
        "Usual causes: a learning rate too high, a division by zero or log(0) in the loss, bad values in the data"
    )
