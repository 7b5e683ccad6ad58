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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from raytrain_plus.collective.world import World, wait
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import TaskError, TrainingError
from raytrain_plus.parallel.data import BUCKET_BYTES, Gradients, square_norm
from raytrain_plus.parallel.pipeline.layout import tied_groups
from raytrain_plus.state import transfer
from raytrain_plus.state.holding import Holding
from raytrain_plus.state.named import dtype_name
from raytrain_plus.task import Task
from raytrain_plus.training import header
from raytrain_plus.training.buffers import Buffers
from raytrain_plus.training.control import Control
from raytrain_plus.training.model import Built
from raytrain_plus.training.passes import Overlapping, Part, Passes, Shards, Whole
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
    reduce_s: float = field(compare=False)
    """How long the sums were waited for when its own part was computed. Two that came to the same are equal."""


@dataclass(frozen=True, slots=True)
class _Summed:
    """A step of which all sums are there, and nothing is applied."""

    step: int
    totals: header.StepTotals
    scales: dict[str, int]


class Stepper:
    """Holds a model's training state and moves it step by step."""

    def __init__(
        self,
        task: Task,
        built: Sequence[Built],
        *,
        seed: int,
        shards: int,
        clip_norm: float | None,
        device: torch.device,
        exact: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`built`: the model, or those chunks of it that this worker holds. `exact`: sums over shards are the same bits
        in any order. Raises `TaskError` for what cannot be summed so."""
        self.task = task
        exact_shards = shards if exact else None
        self.parts = tuple(
            _part(task, one, seed, device, bucket_bytes, exact_shards, None if number else shards, f".{number}")
            for number, one in enumerate(built)
        )
        named = [pair for part in self.parts for pair in part.parameters]
        self.named = [(name, value) for name, value in named if value.requires_grad]
        self.optimizer = task.optimizer(self.named) if self.named else None
        """None where a stage trains nothing: it has frozen layers alone, or none with weights."""
        self.scheduler = None if self.optimizer is None else task.scheduler(self.optimizer)
        self.device = device
        self.passes: Passes = Whole(task, self.parts[0], device, shards)
        """Where the model is in stages, others for each generation."""
        self.held: int | None = -1
        """The step whose state this is; None while it is being changed, and after a change that did not end."""
        self.scales: dict[str, int] = {}
        """The grids of the next exact sums, by parameter and buffer."""
        self._exact = [
            *(exact for part in self.parts for exact in part.gradients.exact),
            *(part.buffers.exact for part in self.parts if part.buffers.exact),
        ]
        self.tied = built[0].tied
        """In the whole model, parameters that are copies -> what they are copies of."""
        self._tied = [names for names in tied_groups(self.tied) if not dict(self.named).keys().isdisjoint(names)]
        self._frozen = [(name, value) for name, value in named if not value.requires_grad]
        self._persistent = [
            name for part in self.parts for name, _ in part.module.named_buffers() if name in part.module.state_dict()
        ]
        self._clip_norm = clip_norm
        self._summed: _Summed | None = None
        self._ended: int | None = None
        """The last step of a window that is made here, and is not known to be made everywhere."""
        self.squares: dict[str, float] = {}
        """Of the step that was applied last, the squares of the norms of all the model's gradients, where they are
        clipped: who has yet to apply it needs them."""

    @property
    def ready(self) -> int | None:
        """The step that it can `finish`, if there is one."""
        return self._ended if self._summed is None else self._summed.step

    @property
    def module(self) -> nn.Module:
        """The whole model, where this worker holds it."""
        [part] = self.parts
        return part.module

    def run(
        self,
        step: int,
        shards: Mapping[int, Sequence[Microbatch]],
        world: World,
        *,
        control: Control,
        wait_s: float,
        meanwhile: Callable[[], None] = lambda: None,
        flags: Callable[[], header.Flags] = header.Flags,
    ) -> Applied:
        """Makes step `step` over the microbatches of the hosted `shards`, together with the world's other members.

        `meanwhile` is called when its own part is computed, before the wait for the others'; `flags` what this worker
        has to say to all.

        Raises `TrainingError` where a loss is not finite (before anything changed) and `Interrupted` or `WaitExpired`
        (after `wait_s` in one collective) where the world breaks.
        """
        for part in self.parts:
            part.module.train()
        scales = self.scales
        self._summed = None
        reduce_s = 0.0
        for _ in range(TRIES):
            for part in self.parts:
                part.gradients.begin(scales)
                part.buffers.begin_step(scales)
            works = self.passes.run(step, shards, world, control, flags)
            control.enter("collective")
            meanwhile()
            computed = time.monotonic()
            for index, work in enumerate(works):
                wait(work, f"the sum of gradient bucket {index} in step {step}", wait_s, control.interrupted)
            totals = self._totals(step)
            self._reduce_buffers(step, world, wait_s, control)
            readings = [exact.read() for exact in self._exact]
            settled = all(reading.settled for reading in readings)
            if settled:
                for part in self.parts:
                    part.gradients.take_means(totals.weight)
            self._take_tied(settled)
            if settled:
                grids = {name: scale for reading in readings for name, scale in reading.scales.items()}
                self._summed = _Summed(step, totals, grids)
            squares = self._squares() if settled else {}
            settled, squares = self.passes.agree(step, settled, squares, world, control, wait_s)
            reduce_s += time.monotonic() - computed
            if settled:
                break
            self._summed = None
            scales = {**scales, **self._measured(step, world, wait_s, control)}
        else:
            raise TrainingError(
                f"the gradients of step {step} are others each time they are computed, by far; "
                "`reduction: exact` needs a loss that draws its random numbers from torch, NumPy or random"
            )
        # Who is to leave may have given its state out: it changes no more.
        control.check()
        control.enter("applying")
        self._apply(squares)
        return Applied(rows=totals.rows, loss=totals.loss, flags=totals.flags, notes=totals.notes, reduce_s=reduce_s)

    def run_window(
        self,
        steps: range,
        counted: Callable[[int], Shards],
        batches: Callable[[int], Shards],
        world: World,
        *,
        control: Control,
        wait_s: float,
        flags: Callable[[], header.Flags] = header.Flags,
    ) -> list[Applied]:
        """Makes these steps by passes that overlap: `passes.Overlapping` says what the arguments are.

        A stage is changed by each step when its own part of that is there, and the state is one again after the last.
        Raises what `run` raises; the state is none where it has begun to change.
        """
        passes = self.passes
        assert isinstance(passes, Overlapping)
        for part in self.parts:
            part.module.train()
            part.gradients.begin({})
        self._summed = self._ended = None
        made: list[Applied] = []

        def end(step: int) -> None:
            works = [
                work for part in self.parts for work in part.gradients.reduce_during(lambda: None, world, control.check)
            ]
            control.enter("collective")
            computed = time.monotonic()
            for index, work in enumerate(works):
                wait(work, f"the sum of gradient bucket {index} in step {step}", wait_s, control.interrupted)
            reduce_s = time.monotonic() - computed
            totals = self._totals(step)
            for part in self.parts:
                part.gradients.take_means(totals.weight)
            control.check()
            control.enter("applying")
            self.held = None
            with passes.updating():
                self._change(step)
            for part in self.parts:
                part.gradients.begin({})
            made.append(
                Applied(rows=totals.rows, loss=totals.loss, flags=totals.flags, notes=totals.notes, reduce_s=reduce_s)
            )
            # What comes next waits for others.
            control.enter("collective")

        passes.run_window(steps, counted, batches, control, flags, end)
        for part in self.parts:
            part.buffers.check_unchanged()
        self._ended = steps[-1]
        passes.agree(steps[-1], True, {}, world, control, wait_s)
        control.check()
        self.finish({})
        return made

    def finish(self, squares: Mapping[str, float]) -> None:
        """Applies the step of which it has all sums, because others have: these are the `squares` they agreed on. Or
        takes the steps for made that others, too, have come to the end of."""
        if self._ended is None:
            self._apply(squares)
        else:
            self.held, self._ended = self._ended, None

    def snapshot(self) -> transfer.Snapshot:
        """The committed state, for a worker that lacks it. Not to be called while a step applies."""
        assert self.held is not None, "a dirty state is never given away"
        return transfer.take(self.held, self.holding())

    def adopt(self, snapshot: transfer.Snapshot) -> None:
        """Takes another worker's state in place of its own."""
        self.held = self._summed = self._ended = None
        transfer.put(snapshot, self.holding())
        self.restore_buffers()
        self.held = snapshot.step

    def restore_buffers(self) -> None:
        """Puts the committed buffers into the model."""
        for part in self.parts:
            part.buffers.restore()

    def holding(self) -> Holding:
        """Where the state is."""
        return Holding(
            {name: value for part in self.parts for name, value in part.buffers.committed.items()},
            self.named,
            self._frozen,
            self.optimizer,
            self.scheduler,
            self.scales,
            self._persistent,
        )

    def _apply(self, squares: Mapping[str, float]) -> None:
        summed, self._summed = self._summed, None
        assert summed is not None, "its sums are there"
        step = summed.step
        if self._clip_norm is not None:
            self._clip(step, self._clip_norm, squares)
        self.held = None
        self._change(step)
        for part in self.parts:
            part.buffers.commit(summed.totals.rows)
        self.scales = summed.scales
        self.squares = dict(squares)
        self.held = step

    def _change(self, step: int) -> None:
        # An optimizer may draw, too.
        self.parts[0].keys.apply(step)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _totals(self, step: int) -> header.StepTotals:
        """What the step's header says. Raises `TrainingError` where there is nothing to learn from."""
        head = self.parts[0].gradients.rider
        totals = header.decode(header.from_digits(head.to("cpu", torch.float64).numpy(), dtype_name(head.dtype)))
        if totals.bad_shards:
            raise TrainingError(_not_finite(step, totals.bad_shards))
        if not totals.weight:
            raise TrainingError(
                f"the weights that the task's loss gave in step {step} add up to 0: there is no mean to learn from"
            )
        return totals

    def _reduce_buffers(self, step: int, world: World, wait_s: float, control: Control) -> None:
        works = [world.reduce(*vector) for part in self.parts for vector in part.buffers.to_reduce()]
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

    def _take_tied(self, settled: bool) -> None:
        """Gives tied parameters the sum of their gradients, in the order of names, wherever in the cell they are."""
        if not self._tied:
            return
        own = dict(self.named)
        found = self.passes.tied({name: _gradient(own[name]) for names in self._tied for name in names if name in own})
        for names in self._tied if settled else ():
            total = sum((found[name] for name in names[1:]), found[names[0]])
            for name in names:
                if name in own:
                    _gradient(own[name]).copy_(total)

    def _squares(self) -> dict[str, float]:
        """Of each parameter's gradient, tied ones once, the square of its norm, where it is to be clipped."""
        if self._clip_norm is None:
            return {}
        return {name: square_norm(_gradient(value)) for name, value in self.named if name not in self.tied}

    def _clip(self, step: int, limit: float, squares: Mapping[str, float]) -> None:
        # In the order of names, however the model is cut.
        norm = math.sqrt(sum(squares[name] for name in sorted(squares)))
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient of step {step} is not finite (norm {norm}), though its loss is")
        if norm > limit:
            for part in self.parts:
                part.gradients.scale(limit / (norm + 1e-6))


def _part(
    task: Task,
    built: Built,
    seed: int,
    device: torch.device,
    bucket_bytes: int,
    exact_shards: int | None,
    shards: int | None,
    label: str,
) -> Part:
    """`shards`: where the header rides along, for how many."""
    named = list(built.module.named_parameters())
    if exact_shards is not None:
        _check_exact(named)
    return Part(
        built.module,
        named,
        Gradients(
            [(name, value) for name, value in named if value.requires_grad],
            bucket_bytes,
            rider=None if shards is None else lambda dtype: header.digits(shards, dtype_name(dtype)),
            exact_shards=exact_shards,
            label=label,
        ),
        Buffers(built.module, task, exact_shards, label),
        LayerKeys(built.module, built.layers, seed),
    )


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
