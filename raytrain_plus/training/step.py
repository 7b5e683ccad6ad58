"""A step is a transaction: everything is summed first, and only then does anything change.

    each hosted shard, in order
        committed buffers back -> each microbatch: keys set, forward, weighted backward
    last backward of all:  buckets submitted as they fill; the header rides on the first
    all sums complete -> divided by the weight -> checked -> clipped -> optimizer, scheduler, buffers    = applied

A step is recomputed, before anything has changed, in two cases. If exact sums (`collective.exact`) did not fit their
grids, it is recomputed on grids that fit. If a sum is not finite, it is recomputed with a check after each shard.
`verdict` decides what follows.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from raytrain_plus.collective.world import World, wait
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import TaskError, TrainingError
from raytrain_plus.parallel.data import BUCKET_BYTES, Gradients
from raytrain_plus.parallel.pipeline.layout import tied_groups
from raytrain_plus.state import transfer
from raytrain_plus.state.finite import not_finite
from raytrain_plus.state.holding import SKIPPED, Holding, model_state
from raytrain_plus.state.named import dtype_name
from raytrain_plus.task import Task
from raytrain_plus.training import header
from raytrain_plus.training.buffers import Buffers
from raytrain_plus.training.control import Control
from raytrain_plus.training.fault_search import FaultSearch, Norms
from raytrain_plus.training.model import Built
from raytrain_plus.training.passes import Overlapping, Part, Passes, Shards, Whole, nothing
from raytrain_plus.training.randomness import LayerKeys
from raytrain_plus.training.verdict import (
    BUFFER,
    LOSS,
    SKIPPED_IN_A_ROW,
    Fault,
    Said,
    gradient_norm,
    of_step,
    squares_of,
    why_refused,
)

TRIES = 3
"""How often a step is computed until its sums are fit or known to stay unfit; a reproducible step needs at most two."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A step that changed the state."""

    rows: int
    loss: float
    flags: header.Flags
    """The flags that members raised at this boundary."""
    notes: bytes
    """Each shard's contribution for the ledger: `data.ledger.NOTE`s in shard order."""
    grad_norm: float
    """Global norm of the gradient before clipping; NaN or infinite if the step was skipped for it."""
    skipped: bool = False
    """Sums were not finite: weights, optimizer, scheduler and buffers are unchanged."""
    reduce_s: float = field(compare=False)
    """Seconds of waiting for the sums after this worker's own part; ignored in comparisons of results."""


@dataclass(frozen=True, slots=True)
class _Summed:
    """A step with complete sums that is not applied yet."""

    step: int
    totals: header.StepTotals
    scales: dict[str, int]


class Stepper:
    """Holds a model's training state and advances it step by step."""

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
        skip_nonfinite: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Build the training state.

        `built`: the model, or the chunks of it that this worker holds. `exact`: sums over shards are the same bits in
        any order. `skip_nonfinite`: keep the state in a step whose sums are not finite, instead of raising. Raises
        `TaskError` for parameters that cannot be summed exactly.
        """
        self.task = task
        self._shards = shards
        exact_shards = shards if exact else None
        self.parts = tuple(
            _part(task, one, seed, device, bucket_bytes, exact_shards, None if number else shards, f".{number}")
            for number, one in enumerate(built)
        )
        named = [pair for part in self.parts for pair in part.parameters]
        self.named = [(name, value) for name, value in named if value.requires_grad]
        self.optimizer = task.optimizer(self.named) if self.named else None
        """None if a stage trains nothing: it has only frozen layers, or layers without weights."""
        self.scheduler = None if self.optimizer is None else task.scheduler(self.optimizer)
        self.device = device
        self.passes: Passes = Whole(task, self.parts[0], device, shards)
        """Replaced in each generation if the model has stages."""
        self.held: int | None = -1
        """The last applied step; None while the state is partially applied, also after a
        change that did not complete.
        """
        self.scales: dict[str, int] = {}
        """The grids of the next exact sums, by parameter and buffer."""
        self.counts = {SKIPPED: 0}
        """Part of the committed state: the number of consecutive skipped steps up to this one."""
        self._exact = [
            *(exact for part in self.parts for exact in part.gradients.exact),
            *(part.buffers.exact for part in self.parts if part.buffers.exact),
        ]
        self.tied = built[0].tied
        """For the whole model: parameters that are copies -> the parameters they copy."""
        self._tied = [names for names in tied_groups(self.tied) if not dict(self.named).keys().isdisjoint(names)]
        self._frozen = [(name, value) for name, value in named if not value.requires_grad]
        self._persistent = [
            name for part in self.parts for name, _ in part.module.named_buffers() if name in part.module.state_dict()
        ]
        self._clip_norm = clip_norm
        self._skip_nonfinite = skip_nonfinite
        self.allowed: frozenset[str] = frozenset()
        """Names of values that are not finite from the beginning, such as a mask with infinities."""
        self._summed: _Summed | None = None
        self._ended: int | None = None
        """The last step of a window that is complete here, and not known to be complete everywhere."""
        self.squares: dict[str, float] = {}
        """Squared gradient norms of all parameters of the model in the last applied step.

        A worker that has yet to apply that step needs them.
        """
        self.allowed = frozenset(not_finite(model_state(self.holding()).items()))

    @property
    def ready(self) -> int | None:
        """The step that `finish` can complete, or None."""
        return self._ended if self._summed is None else self._summed.step

    @property
    def module(self) -> nn.Module:
        """The whole model, if this worker holds it."""
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
        """Compute and apply step `step` over the microbatches of the hosted `shards`, with the world's other members.

        `meanwhile` is called once this worker's own part is computed, before the wait for the others. `flags` returns
        the flags that this worker raises.

        Raises `TrainingError` if loss or sums are not finite (before anything changed), unless such steps are skipped.
        Raises `Interrupted` or `WaitExpired` (after `wait_s` in one collective) if the world breaks.
        """
        for part in self.parts:
            part.module.train()
        scales, search, unfit, reduce_s, refused = self.scales, None, list[str](), 0.0, ""
        for _ in range(TRIES):
            self._summed = None
            computed_s, totals, said = self._compute(
                step,
                shards,
                world,
                scales,
                search,
                unfit,
                control=control,
                wait_s=wait_s,
                meanwhile=meanwhile,
                flags=flags,
            )
            reduce_s += time.monotonic() - computed_s
            refused = why_refused(step, totals.bad_shards, said, searched=search is not None)
            if said.fit or refused:
                break
            if said.settled:
                search = FaultSearch()
            else:
                measured, bad = self._measured(step, world, wait_s, control)
                # The gradients of these parameters were searched and are finite in each shard.
                unfit = [] if search is None else bad
                scales, search = {**scales, **measured}, FaultSearch() if bad else None
        else:
            raise TrainingError(
                f"the gradients of step {step} are not reproducible: each computation gives very different values; "
                "`reduction: exact` needs a loss that draws its random numbers from torch, NumPy or random"
            )
        if refused:
            self._check_may_skip(refused)
        elif search is not None:
            log.warning("step %d was not finite, but is finite when recomputed: check for faulty memory", step)
        # A worker that must leave may have handed over its state, so it must not change it.
        control.check()
        control.enter("applying")
        self._apply(said.squares)
        return Applied(
            rows=totals.rows,
            loss=totals.loss,
            flags=totals.flags,
            notes=totals.notes,
            grad_norm=gradient_norm(said.squares),
            skipped=bool(refused),
            reduce_s=reduce_s,
        )

    def _compute(
        self,
        step: int,
        shards: Shards,
        world: World,
        scales: Mapping[str, int],
        search: FaultSearch | None,
        unfit: Sequence[str],
        *,
        control: Control,
        wait_s: float,
        meanwhile: Callable[[], None],
        flags: Callable[[], header.Flags],
    ) -> tuple[float, header.StepTotals, Said]:
        """Run the passes and the sums of a step once.

        Returns the time at which this worker's own part was computed (monotonic seconds), the header's totals, and what
        all stages know of the sums. `unfit`: exact sums that were not finite the last time, although each shard's
        gradients were searched.
        """
        for part in self.parts:
            part.gradients.begin(scales)
            part.buffers.begin_step(scales)
        works = self.passes.run(step, shards, world, control, flags, search)
        control.enter("collective")
        meanwhile()
        computed_s = time.monotonic()
        for index, work in enumerate(works):
            wait(work, f"the sum of gradient bucket {index} in step {step}", wait_s, control.interrupted)
        totals = self._totals()
        if not totals.weight:
            raise TrainingError(
                f"the weights that the task's loss returned in step {step} sum to 0: the mean loss is undefined"
            )
        self._reduce_buffers(step, world, wait_s, control)
        readings = [exact.read() for exact in self._exact]
        settled = all(reading.settled for reading in readings)
        if settled:
            for part in self.parts:
                part.gradients.take_means(totals.weight)
        self._take_tied(settled)
        squares = self._squares() if settled else {}
        if totals.bad_shards:
            squares[LOSS] = math.nan
        if not settled:
            squares |= dict.fromkeys(unfit, math.nan)
        fault = None if search is None else self._first_fault(search, step, world, wait_s, control)
        if fault is not None:
            squares[fault.parameter] = math.nan
        if settled or squares:
            grids = {name: scale for reading in readings for name, scale in reading.scales.items()}
            self._summed = _Summed(step, totals, grids)
        said = self.passes.agree(step, Said(settled, squares, fault), world, control, wait_s)
        return computed_s, totals, said

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
        """Compute and apply these steps with overlapping passes; see `passes.Overlapping` for the arguments.

        Each stage applies a step when its own part of that step is complete; the state is consistent again after the
        last step. Raises the errors of `run`; the state is unusable if it has begun to change.
        """
        passes = self.passes
        assert isinstance(passes, Overlapping)
        for part in self.parts:
            part.module.train()
            part.gradients.begin({})
        self._summed = self._ended = None
        made: list[tuple[header.StepTotals, float]] = []
        """For each step, its totals and the seconds of waiting for its sums."""
        squares: dict[str, float] = {}

        def end(step: int, search: FaultSearch) -> None:
            works = [
                work for part in self.parts for work in part.gradients.reduce_during(nothing, world, control.check)
            ]
            control.enter("collective")
            computed = time.monotonic()
            for index, work in enumerate(works):
                wait(work, f"the sum of gradient bucket {index} in step {step}", wait_s, control.interrupted)
            reduce_s = time.monotonic() - computed
            totals = self._totals()
            for part in self.parts:
                part.gradients.take_means(totals.weight)
            own = self._squares()
            self._check_window_step(step, totals, own, search, world, wait_s, control)
            squares.update(of_step(step, own))
            control.check()
            control.enter("applying")
            self.held = None
            with passes.updating():
                self._change(step)
            for part in self.parts:
                part.gradients.begin({})
            made.append((totals, reduce_s))
            # The next action waits for other workers.
            control.enter("collective")

        passes.run_window(steps, counted, batches, control, flags, end)
        for part in self.parts:
            part.buffers.check_unchanged()
        self._ended = steps[-1]
        said = passes.agree(steps[-1], Said(True, squares), world, control, wait_s)
        control.check()
        self.finish({})
        return [
            Applied(
                rows=totals.rows,
                loss=totals.loss,
                flags=totals.flags,
                notes=totals.notes,
                grad_norm=gradient_norm(squares_of(step, said.squares)),
                reduce_s=reduce_s,
            )
            for step, (totals, reduce_s) in zip(steps, made, strict=True)
        ]

    def finish(self, squares: Mapping[str, float]) -> None:
        """Apply the step whose sums are all complete, because others have applied it with the agreed `squares`.

        After a window: mark its steps as applied, because the others have completed it, too.
        """
        if self._ended is None:
            self._apply(squares)
        else:
            self.held, self._ended = self._ended, None

    def snapshot(self) -> transfer.Snapshot:
        """Return the committed state for a worker that lacks it. Must not be called while a step is applied."""
        assert self.held is not None, "a partially applied state is never given away"
        return transfer.take(self.held, self.holding())

    def adopt(self, snapshot: transfer.Snapshot) -> None:
        """Replace the state by another worker's."""
        self.held = self._summed = self._ended = None
        transfer.put(snapshot, self.holding())
        self.restore_buffers()
        self.held = snapshot.step

    def restore_buffers(self) -> None:
        """Put the committed buffers into the model."""
        for part in self.parts:
            part.buffers.restore()

    def holding(self) -> Holding:
        """Return references to all parts of the state."""
        return Holding(
            {name: value for part in self.parts for name, value in part.buffers.committed.items()},
            self.named,
            self._frozen,
            self.optimizer,
            self.scheduler,
            self.scales,
            self._persistent,
            self.counts,
            self.allowed,
        )

    def _apply(self, squares: Mapping[str, float]) -> None:
        summed, self._summed = self._summed, None
        assert summed is not None, "the sums are complete"
        norm = gradient_norm(squares)
        self.squares = dict(squares)
        if not math.isfinite(norm):
            # All workers refuse the step alike: the state after it is the state before it.
            self.restore_buffers()
            self.counts[SKIPPED] += 1
            self.held = summed.step
            return
        self._clip(norm)
        self.held = None
        self._change(summed.step)
        for part in self.parts:
            part.buffers.commit(summed.totals.rows)
        self.scales = summed.scales
        self.counts[SKIPPED] = 0
        self.held = summed.step

    def _check_may_skip(self, refused: str) -> None:
        """Raise `TrainingError` unless a step refused for this reason may be skipped."""
        skipped = self.counts[SKIPPED] + 1
        if self._skip_nonfinite and skipped < SKIPPED_IN_A_ROW:
            log.warning("skipped: %s", refused)
            return
        self._summed = None
        if self._skip_nonfinite:
            refused += (
                f"; {skipped} consecutive steps were not finite, and `elastic.on_nonfinite: skip` allows {skipped - 1}"
            )
        raise TrainingError(refused)

    def _check_window_step(
        self,
        step: int,
        totals: header.StepTotals,
        squares: Mapping[str, float],
        search: FaultSearch,
        world: World,
        wait_s: float,
        control: Control,
    ) -> None:
        """Raise `TrainingError` if one of several overlapping steps cannot be applied here."""
        said = Said(True, squares)
        if not said.fit:
            said = replace(said, fault=self._first_fault(search, step, world, wait_s, control))
        refused = why_refused(step, totals.bad_shards, said, searched=True)
        if refused:
            raise TrainingError(refused)

    def _change(self, step: int) -> None:
        # An optimizer can draw random numbers, too.
        self.parts[0].keys.apply(step)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _totals(self) -> header.StepTotals:
        """Return the totals in the step's header."""
        head = self.parts[0].gradients.rider
        return header.decode(header.from_digits(head.to("cpu", torch.float64).numpy(), dtype_name(head.dtype)))

    def _reduce_buffers(self, step: int, world: World, wait_s: float, control: Control) -> None:
        works = [world.reduce(*vector) for part in self.parts for vector in part.buffers.to_reduce()]
        for work in works:
            wait(work, f"the buffer sums of step {step}", wait_s, control.interrupted)

    def _measured(self, step: int, world: World, wait_s: float, control: Control) -> tuple[dict[str, int], list[str]]:
        """Return the grids that fit this step's values, and the values that are not
        finite, named as squared norms are.
        """
        largest = torch.from_numpy(np.concatenate([exact.largest() for exact in self._exact])).to(self.device)
        work = world.reduce(largest, "exact.largest", "max")
        wait(work, f"the largest values of step {step}", wait_s, control.interrupted)
        parts = np.split(largest.cpu().numpy(), np.cumsum([len(exact.names) for exact in self._exact])[:-1])
        scales: dict[str, int] = {}
        bad: list[str] = []
        of_buffers = [part.buffers.exact for part in self.parts]
        for exact, largest_of in zip(self._exact, parts, strict=True):
            scales |= exact.scales_from(largest_of)
            prefix = BUFFER if exact in of_buffers else ""
            bad += [prefix + name for name in exact.not_finite(largest_of)]
        return scales, bad

    def _first_fault(
        self, search: FaultSearch, step: int, world: World, wait_s: float, control: Control
    ) -> Fault | None:
        """Return the first fault that the members of this stage's world have found; all members call it together."""
        trained = [name for name, _ in self.named]
        parts = zip(self.passes.chunks, self.parts, strict=True)
        chunk_of = {name: chunk for chunk, part in parts for name, _ in part.parameters}
        # For each shard, the parameter's number, counted from 1: of several, the last one is nearest to the loss.
        found = torch.zeros(self._shards, dtype=torch.int64, device=self.device)
        for fault in search.found():
            found[fault.shard] = max(int(found[fault.shard]), trained.index(fault.parameter) + 1)
        work = world.reduce(found, "faults", "max")
        wait(work, f"the search for non-finite gradients in step {step}", wait_s, control.interrupted)
        for shard, number in enumerate(found.tolist()):
            if number:
                name = trained[number - 1]
                return Fault(shard, chunk_of[name], name)
        return None

    def _take_tied(self, settled: bool) -> None:
        """Give tied parameters the sum of their gradients, in the order of names, on whichever stage they are."""
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
        """Return the squared norm of each parameter's gradient, tied parameters once; NaN for buffers with non-finite
        sums.
        """
        trained = [(name, _gradient(value)) for name, value in self.named if name not in self.tied]
        changes = [(part, change) for part in self.parts for change in part.buffers.changes()]
        squares = Norms([*(gradient for _, gradient in trained), *(change for _, change in changes)]).squares()
        found = {name: square for (name, _), square in zip(trained, squares, strict=False)}
        for (part, _), square in zip(changes, squares[len(trained) :], strict=True):
            if not math.isfinite(square):
                found |= {f"{BUFFER}{name}": math.nan for name in part.buffers.not_finite()}
        return found

    def _clip(self, norm: float) -> None:
        if self._clip_norm is not None and norm > self._clip_norm:
            for part in self.parts:
                part.gradients.scale(self._clip_norm / (norm + 1e-6))


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
    """Build a part. `shards`: the number of shards in the header that this part carries; None if it carries none."""
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
                f"the parameter '{name}' is {dtype_name(value.dtype)}, which `reduction: exact` does not support",
                where="reduction: exact",
                expected="float32 or float64 parameters",
                remedy="keep the parameters in float32, or use reduction: ring",
            )


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "gradients are views into buckets and never None"
    return parameter.grad
