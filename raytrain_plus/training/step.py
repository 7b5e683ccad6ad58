"""One step is one transaction: everything is summed first, and only then does anything change.

each hosted shard, in order
    committed buffers back -> each microbatch: keys set, forward, weighted backward
last backward of all:  buckets submitted as they fill; the header rides on the first
all sums there -> checked -> divided by the weight -> clipped -> optimizer, scheduler, buffers    = applied

Where sums are exact (`collective.exact`) and one did not fit its grid, the whole step is made again, on a grid that
fits: nothing has changed by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from raytrain_plus.collective.world import Work, World, wait
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import TaskError, TrainingError
from raytrain_plus.parallel.data import BUCKET_BYTES, Gradients, square_norm
from raytrain_plus.state import transfer
from raytrain_plus.state.holding import Holding
from raytrain_plus.state.named import dtype_name
from raytrain_plus.task import Task
from raytrain_plus.training import header
from raytrain_plus.training.buffers import Buffers
from raytrain_plus.training.control import Control
from raytrain_plus.training.model import Built, to_device
from raytrain_plus.training.randomness import LayerKeys

TRIES = 3
"""How often a step is made until its exact sums fit their grids; the second time they do, if a step can be repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A step that changed the state."""

    rows: int
    loss: float
    flags: header.Flags
    """What somebody wished for, or said, at this boundary."""
    notes: bytes
    """What each shard gave, for the ledger: `data.ledger.NOTE`s in shard order."""


class Stepper:
    """Holds a model's training state and moves it step by step."""

    def __init__(
        self,
        task: Task,
        built: Built,
        *,
        seed: int,
        shards: int,
        clip_norm: float | None,
        device: torch.device,
        exact: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`exact`: sums over shards are the same bits in any order. Raises `TaskError` for what cannot be summed so."""
        self.task = task
        self.module = built.module
        named = list(built.module.named_parameters())
        self.named = [(name, value) for name, value in named if value.requires_grad]
        self.optimizer = task.optimizer(self.named)
        self.scheduler = task.scheduler(self.optimizer)
        exact_shards = shards if exact else None
        if exact:
            _check_exact(named)
        self.gradients = Gradients(
            self.named,
            bucket_bytes,
            rider=lambda dtype: header.digits(shards, dtype_name(dtype)),
            exact_shards=exact_shards,
        )
        self.buffers = Buffers(built.module, task, exact_shards)
        self.keys = LayerKeys(built.module, built.layers, seed)
        self.device = device
        self.held: int | None = -1
        """The step whose state this is; None while it is being changed, and after a change that did not end."""
        self.scales: dict[str, int] = {}
        """The grids of the next exact sums, by parameter and buffer."""
        self._exact = [*self.gradients.exact, *([self.buffers.exact] if self.buffers.exact else [])]
        self._frozen = [(name, value) for name, value in named if not value.requires_grad]
        self._persistent = [name for name, _ in built.module.named_buffers() if name in built.module.state_dict()]
        self._shards = shards
        self._clip_norm = clip_norm

    def run(
        self,
        step: int,
        shards: Mapping[int, Sequence[Microbatch]],
        world: World,
        *,
        control: Control,
        wait_s: float,
        meanwhile: Callable[[], None] = lambda: None,
        busy: Callable[[], bool] = lambda: False,
    ) -> Applied:
        """Makes step `step` over the microbatches of the hosted `shards`, together with the world's other members.

        `meanwhile` is called when its own part is computed, before the wait for the others'; `busy` says whether an
        earlier checkpoint is still being written here.

        Raises `TrainingError` where a loss is not finite (before anything changed) and `Interrupted` or `WaitExpired`
        (after `wait_s` in one collective) where the world breaks.
        """
        self.module.train()
        scales = self.scales
        for _ in range(TRIES):
            works = self._forward_backward(step, shards, world, control, scales, busy)
            control.enter("collective")
            meanwhile()
            for index, work in enumerate(works):
                wait(work, f"the sum of gradient bucket {index} in step {step}", wait_s, control.interrupted)
            head = self.gradients.rider
            totals = header.decode(header.from_digits(head.to("cpu", torch.float64).numpy(), dtype_name(head.dtype)))
            if totals.bad_shards:
                raise TrainingError(_not_finite(step, totals.bad_shards))
            if not totals.weight:
                raise TrainingError(
                    f"the weights that the task's loss gave in step {step} add up to 0: there is no mean to learn from"
                )
            self._reduce_buffers(step, world, wait_s, control)
            readings = [exact.read() for exact in self._exact]
            if all(reading.settled for reading in readings):
                break
            scales = {**scales, **self._measured(step, world, wait_s, control)}
        else:
            raise TrainingError(
                f"the gradients of step {step} are others each time they are computed, by far; "
                "`reduction: exact` needs a loss that draws its random numbers from torch, NumPy or random"
            )
        # Who is to leave may have given its state out: it changes no more.
        control.check()
        control.enter("applying")
        self._apply(step, totals, {name: scale for reading in readings for name, scale in reading.scales.items()})
        return Applied(rows=totals.rows, loss=totals.loss, flags=totals.flags, notes=totals.notes)

    def snapshot(self) -> transfer.Snapshot:
        """The committed state, for a worker that lacks it. Not to be called while a step applies."""
        assert self.held is not None, "a dirty state is never given away"
        return transfer.take(self.held, self.holding())

    def adopt(self, snapshot: transfer.Snapshot) -> None:
        """Takes another worker's state in place of its own."""
        self.held = None
        transfer.put(snapshot, self.holding())
        self.buffers.restore()
        self.held = snapshot.step

    def holding(self) -> Holding:
        """Where the state is."""
        return Holding(
            self.buffers.committed,
            self.named,
            self._frozen,
            self.optimizer,
            self.scheduler,
            self.scales,
            self._persistent,
        )

    def _forward_backward(
        self,
        step: int,
        shards: Mapping[int, Sequence[Microbatch]],
        world: World,
        control: Control,
        scales: Mapping[str, int],
        busy: Callable[[], bool],
    ) -> list[Work]:
        self.gradients.begin(scales)
        self.buffers.begin_step(scales)
        before = self._weights()
        reports: dict[int, header.ShardReport] = {}
        last = max(shards, default=-1)
        for shard in sorted(shards):
            self.buffers.restore()
            rows, ids, weight_sum, loss_sum = 0, 0, 0.0, 0.0
            start = shards[shard][0].start
            for index, microbatch in enumerate(shards[shard]):
                control.check()
                control.enter("computing")
                with self.keys.microbatch(step, shard, index) as keyed:
                    loss, weight = self._loss(microbatch)
                    rows += microbatch.rows
                    ids = (ids + microbatch.ids) % 2**64
                    weight_sum += weight
                    loss_sum += float(loss.detach()) * weight
                    if index + 1 == len(shards[shard]):
                        reports[shard] = header.ShardReport(start, rows, ids, weight_sum, loss_sum)
                        self.buffers.end_shard(shard, rows)
                    self._check_unchanged(before)
                    keyed.backward()
                    if shard == last and index + 1 == len(shards[shard]):
                        flags = header.Flags(pause=control.pausing(), save=control.saving(), busy=busy())
                        return self._last_backward(loss * weight, reports, flags, world, control)
                    (loss * weight).backward()
            self.gradients.end_shard()
        raise AssertionError("a worker in a world hosts at least one shard with rows in every step")

    def _weights(self) -> list[int]:
        """How often each parameter has been written to."""
        return [value._version for _, value in (*self.named, *self._frozen)]

    def _check_unchanged(self, before: Sequence[int]) -> None:
        now = self._weights()
        if now != before:
            changed = next(
                name for (name, _), a, b in zip((*self.named, *self._frozen), now, before, strict=True) if a != b
            )
            raise TrainingError(
                f"the loss changed the parameter '{changed}' in place, once for every microbatch: only a step may; "
                "a moving average belongs into a buffer (register_buffer), and an embedding can have no max_norm"
            )

    def _last_backward(
        self,
        loss: torch.Tensor,
        reports: dict[int, header.ShardReport],
        flags: header.Flags,
        world: World,
        control: Control,
    ) -> list[Work]:
        head = self.gradients.rider
        encoded = header.encode(reports, self._shards, flags)
        head.copy_(torch.from_numpy(header.to_digits(encoded, dtype_name(head.dtype))))
        return self.gradients.reduce_during(loss.backward, world, control.check)

    def _loss(self, microbatch: Microbatch) -> tuple[torch.Tensor, float]:
        # An exact sum may need the step once more, and the same bits from it: a task that writes into its batch writes
        # into a copy, which lies in memory alike wherever the rows came from.
        batch = to_device(microbatch.batch, self.device, copy=bool(self._exact))
        result = self.task.loss(self.module, batch)
        loss, weight = result if isinstance(result, tuple) else (result, float(microbatch.rows))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TrainingError(f"{type(self.task).__name__}.loss returned {shape}; expected a tensor with one value")
        return loss.reshape(()), float(weight)

    def _apply(self, step: int, totals: header.StepTotals, scales: dict[str, int]) -> None:
        self.gradients.take_means(totals.weight)
        if self._clip_norm is not None:
            self._clip(step, self._clip_norm)
        self.held = None
        # An optimizer may draw, too.
        self.keys.apply(step)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.buffers.commit(totals.rows)
        self.scales = scales
        self.held = step

    def _reduce_buffers(self, step: int, world: World, wait_s: float, control: Control) -> None:
        works = [world.reduce(vector, name, operation) for vector, name, operation in self.buffers.to_reduce()]
        for work in works:
            wait(work, f"the buffers of step {step}", wait_s, control.interrupted)

    def _measured(self, step: int, world: World, wait_s: float, control: Control) -> dict[str, int]:
        """The grids that fit this step's values. Raises `TrainingError` where some are not finite."""
        largest = torch.from_numpy(np.concatenate([exact.largest() for exact in self._exact])).to(self.device)
        work = world.reduce(largest, "exact.largest", "max")
        wait(work, f"the largest values of step {step}", wait_s, control.interrupted)
        parts = np.split(largest.cpu().numpy(), np.cumsum([len(exact.names) for exact in self._exact])[:-1])
        bad = [name for exact, part in zip(self._exact, parts, strict=True) for name in exact.not_finite(part)]
        if bad:
            raise TrainingError(
                f"step {step} gives values that are not finite for {', '.join(bad[:3])}, though its loss is finite; "
                "nothing of this step was applied"
            )
        scales: dict[str, int] = {}
        for exact, part in zip(self._exact, parts, strict=True):
            scales |= exact.scales_from(part)
        return scales

    def _clip(self, step: int, limit: float) -> None:
        norm = math.sqrt(square_norm([(name, _gradient(value)) for name, value in self.named]))
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient of step {step} is not finite (norm {norm}), though its loss is")
        if norm > limit:
            self.gradients.scale(limit / (norm + 1e-6))


def _check_exact(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    for name, value in named:
        if value.requires_grad and value.dtype not in (torch.float32, torch.float64):
            raise TaskError(
                f"the parameter '{name}' is {dtype_name(value.dtype)}, which `reduction: exact` does not sum",
                where="reduction: exact",
                expected="float32 or float64 parameters",
                remedy="keep the parameters in float32, or use reduction: ring",
            )


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "gradients are views into buckets and never None"
    return parameter.grad


def _not_finite(step: int, shards: Sequence[int]) -> str:
    which = f"shard {shards[0]}" if len(shards) == 1 else f"shards {', '.join(map(str, shards))}"
    return (
        f"the loss of step {step} is not finite in {which}; nothing of this step was applied. "
        "Usual causes: a learning rate too high, a division by zero or log(0) in the loss, bad values in the data"
    )
