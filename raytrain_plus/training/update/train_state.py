"""The training state of a worker's part of the model: everything that a step changes, and the one place that does.

A step first sums everything (`step`, `window`), and `hold`s the sums here when all of them are complete. Only then does
`apply` change anything. A worker whose generation ends in between still holds those sums: if others have applied the
step, `finish` applies it here too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raytrain_plus.device_copies import StateCopies
from raytrain_plus.membership.owners import senders
from raytrain_plus.membership.pieces import Pieces
from raytrain_plus.membership.slice_names import whole_weight
from raytrain_plus.parallel.gradients import Gradients
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.slicing import cuts_in
from raytrain_plus.state import transfer
from raytrain_plus.state.finite import not_finite
from raytrain_plus.state.holding import (
    AS_BUILT,
    LEFT_ALONE,
    MEAN_LOSS,
    METRICS,
    NEW_RULES,
    NOTHING_ADDED,
    SKIPPED,
    Holding,
    RowLayout,
    model_state,
)
from raytrain_plus.state.stages import Wanted, everything
from raytrain_plus.state.weight_rows import name_of
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import StepTotals
from raytrain_plus.training.exchange.stepwise import Stepwise
from raytrain_plus.training.exchange.verdict import gradient_norm
from raytrain_plus.training.model.model import Built, as_one, other_names, set_training
from raytrain_plus.training.update.layer_sums import LayerSums
from raytrain_plus.training.update.step_sums import StepSums
from raytrain_plus.training.weights.averages import Averages
from raytrain_plus.training.weights.gathered_layer import GatheredLayer
from raytrain_plus.training.weights.loss_scale import FIRST, LossScale, found_in, put
from raytrain_plus.training.weights.model_part import Summing, check_hooks, make_parts
from raytrain_plus.training.weights.optimized_rows import Trained
from raytrain_plus.training.weights.optimizer import build_optimizer
from raytrain_plus.training.weights.row_allgather import Spread
from raytrain_plus.training.weights.scheduler import build_scheduler
from raytrain_plus.training.weights.shardable import Division
from raytrain_plus.training.weights.step_options import PLAIN, Technique


@dataclass(frozen=True, slots=True)
class Summed:
    """A step with complete sums, which are in the parts' gradients and buffers."""

    step: int
    totals: StepTotals
    absent: frozenset[str]
    """The parameters held here that got no gradient."""
    scales: dict[str, int]
    """The grids of the next exact sums."""
    loss_scale: LossScale | None = None
    """The scale of the loss in this step, if it has one."""


class TrainState:
    """The model, or the chunks of it that a worker holds, with optimizer, scheduler, sums and counts."""

    def __init__(
        self,
        task: Task,
        built: Sequence[Built],
        summing: Summing,
        *,
        seed: int,
        technique: Technique = PLAIN,
        division: Division | None = None,
        rebuild: Callable[[], Iterable[Built]] | None = None,
        link: Link | None = None,
    ) -> None:
        """Build the state of what was `built`, with its initial values.

        The technique's precision says on which device. `division`: how the optimizer's state can be divided, if it is
        to be. `rebuild`: builds the layers of the model, one after the other, in place of what was `built`:
        their weights then have memory only while they compute, and the state has no rows of them before `begin_with`.
        `link`: that of the slices built.

        Raises `TaskError` for parameters that cannot be summed exactly, and for a scheduler that needs an argument.
        """
        self.task, self.shards, self.technique = task, summing.shards, technique
        self.device = technique.precision.device
        self.division, self._rebuild = division, rebuild
        self.link = link or Link()
        """Reaches the workers that host the other slices of these layers."""
        self.stepwise = task if isinstance(task, Stepwise) else None
        """The task, if it is told of each step."""
        self.tied: Mapping[str, str] = {}
        """For the whole model: parameters that are copies -> the parameters they copy."""
        self.allowed: frozenset[str] = frozenset()
        """Names of values that are not finite from the beginning, such as a mask with infinities."""
        self.woken = False
        """Whether a layer, or the model, was built in evaluation mode throughout, and is trained in training mode."""
        self.digests: dict[str, str] = {}
        """Of the frozen weights that are not saved, by their names in the model that is not cut."""
        self.parts = make_parts(
            task,
            self._noted(built if rebuild is None else rebuild()),
            summing,
            technique,
            seed=seed,
            gathered=rebuild is not None,
        )
        self.trained = self._trained()
        """The weights that the optimizer changes here."""
        self._build_optimizer()
        self.sums = self._sums(summing)
        """The sums of the step that is being computed, or is held."""
        frozen = [pair for part in self.parts for pair in part.parameters if not pair[1].requires_grad]
        known = {name: self.digests[whole_weight(name)] for name, _ in frozen if whole_weight(name) in self.digests}
        self._rebuilt = {
            name: torch.frombuffer(bytearray.fromhex(one), dtype=torch.uint8) for name, one in known.items()
        }
        self._frozen = [pair for pair in frozen if pair[0] not in self._rebuilt]
        self._persistent = [
            name for part in self.parts for name, _ in part.module.named_buffers() if name in part.module.state_dict()
        ]
        self._shared = {name: first for part in self.parts for name, first in other_names(part.module).items()}
        self._copies = StateCopies(self.device)
        self._before_first_step()
        self.allowed |= frozenset(not_finite((name_of(key), one) for key, one in model_state(self.holding()).items()))

    def _before_first_step(self) -> None:
        """Set what steps change beside the model and its optimizer, as it is before the first one."""
        self.last_applied: int | None = -1
        """The last applied step; None while the state is partially applied, also after an incomplete change."""
        self._held: Summed | None = None
        self._ended: int | None = None
        """The last of overlapping steps that are complete here, and not known to be complete everywhere."""
        self.exchange: Spread | None = None
        """Brings weights that other workers change here; None in a generation whose members change all alike."""
        self._spread_at: int | None = -1
        """The last step after which the weights of all rows were here, those of other workers too."""
        self.squares: dict[str, float] = {}
        """Squared gradient norms of all parameters of the model in the last applied step.

        A worker that has yet to apply that step needs them.
        """
        self.kept: Sequence[str] = ()
        """Settings of the optimizer that came with the state, although the task now makes others; in words."""
        self.scales: dict[str, int] = {}
        """The grids of the next exact sums, by parameter and buffer."""
        self.counts, self.rules = {SKIPPED: 0}, dict(NEW_RULES)
        """Parts of the committed state: the consecutive skipped steps up to this one, and the rules of its steps."""
        self.remembered: dict[str, Any] = {}
        """Part of the committed state: what the task remembers."""
        if self.technique.precision.scales_loss:
            put(LossScale(FIRST), self.counts)

    @property
    def named(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer changes here."""
        return self.trained.named

    @property
    def complete(self) -> bool:
        """Whether the weights of all rows are here, those that other workers have changed too."""
        return self.trained.everything or self.gathered is not None or self._spread_at == self.last_applied

    @property
    def ready(self) -> int | None:
        """The step that `finish` can complete, or None."""
        return self._ended if self._held is None else self._held.step

    @property
    def module(self) -> nn.Module:
        """The whole model, if this worker holds it."""
        [part] = self.parts
        return part.module

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale with which the next step begins; None if losses are not scaled."""
        return found_in(self.counts)

    def begin(
        self,
        members: int,
        scales: Mapping[str, int],
        *,
        buffers: bool = True,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Clear the sums for a step over a world of `size` members; nothing changes that is committed.

        `scales`: the grids of exact sums. `buffers`: whether any may change.
        """
        self._held = self._ended = None
        if self.stepwise is not None and self.last_applied is not None:
            self.stepwise.begin_step(self.last_applied + 1, self.remembered)
        factor = 1.0 if loss_scale is None else loss_scale.factor
        self.sums.begin(scales, self.counts.get(METRICS, 0), members, buffers=buffers, loss_factor=factor)

    def hold(self, summed: Summed) -> None:
        """Hold a step whose sums are all complete here, so that it can be applied."""
        self._held = summed

    def let_go(self) -> None:
        """Hold no step any more: the one whose sums are complete must not be applied."""
        self._held = None

    def apply(self, squares: Mapping[str, float]) -> None:
        """Apply the held step: clip, then change weights, optimizer, scheduler and buffers.

        `squares`: the squared norms of all parameters of the model. If they are not finite, all workers refuse the step
        alike, and the state after it is the state before it.
        """
        held, self._held = self._held, None
        assert held is not None, "the sums are complete"
        self._copies.before_change()
        norm = gradient_norm(squares)
        self.squares = dict(squares)
        self._make_room(held.totals)
        fits = math.isfinite(norm)
        if held.loss_scale is not None:
            put(held.loss_scale.after_step() if fits else held.loss_scale, self.counts)
        if not fits:
            self.restore_buffers()
            self.counts[SKIPPED] += 1
            self.last_applied = held.step
            return
        limit = self.technique.clip_norm
        if limit is not None and norm > limit:
            self.sums.scale(limit / (norm + 1e-6))
        remembered = self._remembered_after(held.totals)
        self.last_applied = None
        self._change(held)
        for part in self.parts:
            part.buffers.commit(held.totals.rows)
        self.remembered.clear()
        self.remembered.update(remembered)
        self.scales = held.scales
        self.counts[SKIPPED] = 0
        self.last_applied = held.step

    def apply_overlapping(self, summed: Summed) -> None:
        """Apply this stage's part of a step while later ones are under way.

        No consistent state exists until `end` and `finish`.
        """
        self._copies.before_change()
        self.last_applied = None
        self._change(summed)
        self._make_room(summed.totals)

    def end(self, step: int) -> None:
        """Note that this stage's part of all overlapping steps, up to `step`, is applied."""
        for part in self.parts:
            part.buffers.check_unchanged()
        self._ended = step

    def finish(self, squares: Mapping[str, float]) -> None:
        """Apply the step whose sums are all complete, because others have applied it with the agreed `squares`.

        After overlapping steps: mark them as applied, because the others have completed them, too.
        """
        if self._ended is None:
            self.apply(squares)
        else:
            self.last_applied, self._ended = self._ended, None

    def own(self, owned: Pieces) -> None:
        """Change these rows of the weights from now on; what belongs to them is then to be adopted, if it exists."""
        if owned == self.trained.owned:
            return
        initial = self.last_applied == -1
        self.discard()
        self.trained.own(owned)
        self._build_optimizer()
        if initial:
            self.last_applied = self._spread_at = -1

    def begin_with(self, owned: Pieces) -> None:
        """Change these rows of the weights from now on, with their initial values."""
        self.own(owned)
        if self._rebuild is not None:
            for one in self._rebuild():
                named = one.module.named_parameters()
                self.trained.put({name: value.detach() for name, value in named if value.requires_grad})
            if self._averages is not None:
                self._averages.begin()

    def joined(self, parts: Sequence[transfer.Snapshot], others: Collection[str] = ()) -> transfer.Snapshot:
        """Return the state with the rows that are changed here, out of `parts` that together have it.

        `others`: the layers of other stages.
        """
        rows = [piece for piece in self.trained.pieces if piece.first < piece.last]
        return transfer.with_rows(parts, rows, others)

    def share_rows(self, owners: Sequence[Pieces]) -> None:
        """Prepare for a world in which each member changes the weights of some rows; `owners`: by rank."""
        trained = self.trained
        numbered = dict(zip(map(str, range(len(owners))), owners, strict=True))
        alike = all(owned == trained.rows for owned in owners)
        self.exchange = None
        if self.gathered is not None:
            self.gathered.share(None if alike else owners)
        elif not alike:
            self.exchange = Spread(
                list(senders(trained.rows, trained.row_bytes, numbered).values()), trained.row_counts
            )

    def spread(self, context: StepContext) -> None:
        """Bring the weights that other workers have changed in the last step here; every member calls it alike."""
        assert self.exchange is not None, "members change different weights"
        what = f"the weights that other workers changed in step {self.last_applied}"
        self.exchange.run(dict(self.trained.weights), "weights", what, context)
        self._spread_at = self.last_applied

    def discard(self) -> None:
        """Hold no state from now on: what is held here belongs to no run."""
        self.last_applied = self._held = self._ended = None
        self.trained.await_copies()

    def adopt(self, snapshot: transfer.Snapshot, *, spread: bool = True) -> None:
        """Replace the state by another worker's; `spread`: whether it has the newest weights of all rows."""
        self.discard()
        self._copies.before_change()
        transfer.load_snapshot(snapshot, self.holding())
        self.trained.copy_to_model()
        self.restore_buffers()
        # Of masters it has its own rows, so the model lacks what others have.
        self._spread_at = None if self.trained.mastered or not spread else snapshot.step
        self.last_applied = snapshot.step

    def snapshot(
        self, wanted: Wanted = everything, rows: Pieces | None = None, *, with_values: bool = False
    ) -> transfer.Snapshot:
        """Return the committed state, or some layers of it, for a worker that lacks it.

        `rows`: the rows whose optimizer's state is wanted, if each worker has that of some; `with_values`: see
        `transfer.take_rows`. Must not be called while a step is applied.
        """
        assert self.last_applied is not None, "a partially applied state is never given away"
        if rows is None:
            return transfer.take_snapshot(self.last_applied, self.holding(), wanted)
        return transfer.take_rows(self.last_applied, self.holding(), wanted, rows, with_values=with_values)

    def holding(self) -> Holding:
        """Return references to all parts of the state."""
        trained = self.trained
        sharded = self.division is not None
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
            self.rules,
            () if self._averages is None else self._averages.named,
            RowLayout(trained.pieces, trained.row_counts, trained.shared) if sharded else None,
            {name: cut for part in self.parts for name, cut in cuts_in(part.module).items()},
            self._copies,
            self._shared,
            self.remembered,
            self._rebuilt,
        )

    def averaged(self, context: StepContext | None = None) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the averages of its weights, if there are any.

        `context`: to bring those of other workers here, if there are such.
        """
        if self._averages is None:
            return nullcontext()
        averages = dict(self._averages.named)
        of_rows = dict(zip(self.trained.pieces, (value for _, value in self._averages.named), strict=True))
        if self.gathered is not None:
            return self.gathered.holding(of_rows)
        exchange = None if context is None else self.exchange
        # A trial has the rows of one worker, and nobody to ask for the others.
        if exchange is not None or self.technique.offloads or not self.trained.everything:
            whole = self.trained.whole(of_rows)
            if exchange is not None and context is not None:
                exchange.run(whole, "averages", "the averages of weights that other workers change", context)
            averages = {name: nn.Parameter(value, requires_grad=False) for name, value in whole.items()}
        return self._averages.in_model(averages)

    def renew_rates(self) -> None:
        """Set the rates and other settings of the optimizer as the task makes them, as many steps into its schedule."""
        if self.optimizer is None:
            return
        self._copies.before_change()
        made = getattr(self.scheduler, "last_epoch", (self.last_applied or 0) + 1)
        kept = self.optimizer.state
        self._make_optimizer()
        self.optimizer.state.clear()
        self.optimizer.state.update(kept)
        if self.scheduler is not None:
            with warnings.catch_warnings():
                # It warns of steps of a scheduler without any of its optimizer.
                warnings.simplefilter("ignore")
                for _ in range(made):
                    self.scheduler.step()

    def restore_buffers(self) -> None:
        """Put the committed buffers into the model."""
        for part in self.parts:
            part.buffers.restore()

    def train(self, training: bool = True) -> None:
        """Set the modules to training, but for those that were built in evaluation mode; or all to evaluation."""
        for part in self.parts:
            if not self.rules[NOTHING_ADDED]:
                part.added.allow()
            if training and self.rules[MEAN_LOSS]:
                check_hooks(part.hooked)
            if training:
                set_training(part.module, part.in_evaluation if self.rules[AS_BUILT] else ())
            else:
                part.module.eval()

    @property
    def trained_in_evaluation(self) -> str:
        """The first module with trained parameters of its own that stays in evaluation mode; empty without one."""
        kept = {id(one) for part in self.parts for one in part.in_evaluation}
        found = (
            str(name)
            for part in self.parts
            for name, one in part.module.named_modules()
            if id(one) in kept and any(value.requires_grad for value in one.parameters(recurse=False))
        )
        return next(found, "")

    def _remembered_after(self, totals: StepTotals) -> Mapping[str, Any]:
        """Return what the task remembers after a step."""
        if self.stepwise is None or not self.stepwise.remembers():
            return {}
        return self.stepwise.remembered(self.remembered, {"loss": totals.loss, **totals.metrics})

    def _change(self, summed: Summed) -> None:
        """Change weights, optimizer and scheduler; parameters without a gradient are left alone."""
        # An optimizer can draw random numbers, too.
        self.parts[0].keys.apply(summed.step)
        if self.optimizer is not None:
            with self.sums.without(summed.absent if self.rules[LEFT_ALONE] else ()):
                self.trained.share_gradients()
                self.optimizer.step()
            self.trained.copy_to_model()
            if self._averages is not None:
                self._averages.update(self.counts)
        if self.scheduler is not None:
            self.scheduler.step()

    def _noted(self, built: Iterable[Built]) -> Iterator[Built]:
        """Yield the same, and note what is to be known of it before its weights lose their memory."""
        for one in built:
            self.tied = one.tied
            self.digests |= one.rebuilt
            self.woken |= one.woken
            if self._rebuild is not None:
                kinds = ("param",) if self.technique.decay is None else ("param", "ema")
                named = [(f"{kind}/{name}", value) for kind in kinds for name, value in one.module.named_parameters()]
                self.allowed |= frozenset(not_finite(named))
            yield one

    def _trained(self) -> Trained:
        """Return the trained weights of all parts."""
        return Trained(
            [pair for part in self.parts for pair in part.parameters if pair[1].requires_grad],
            {name: value for part in self.parts for name, value in part.masters.items()},
            () if self.division is None else self.division.undivided,
            gathered=self._rebuild is not None,
            copies=StateCopies(self.device) if self.technique.offloads else None,
        )

    def _sums(self, summing: Summing) -> StepSums:
        """Return the sums of a step, and prepare the gathering of weights if they are to be gathered."""
        self.gathered: GatheredLayer | None = None
        """The weights of layers that have memory only while their layer computes; None if all have memory."""
        if self._rebuild is None:
            return StepSums(
                self.parts,
                self.trained,
                self.tied,
                shards=self.shards,
                device=self.device,
                clip_value=self.technique.clip_value,
            )
        trained = self.trained
        layers = [[name for name, value in part.parameters if value.requires_grad] for part in self.parts]
        self.gathered = GatheredLayer(trained, layers)
        device = self.device
        head = Gradients([], rider=summing.header, make_wire=summing.wire, label=".header", device=device)
        return LayerSums(
            self.parts,
            trained,
            self.tied,
            head,
            shards=self.shards,
            device=device,
            clip_value=self.technique.clip_value,
        )

    def _build_optimizer(self) -> None:
        """Build optimizer, scheduler and averages of the weights that are changed here."""
        self._make_optimizer()
        decay = self.technique.decay
        modules = [part.module for part in self.parts]
        self._averages = None if decay is None else Averages(self.named, modules, decay)

    def _make_optimizer(self) -> None:
        """Build optimizer and scheduler."""
        named = self.named
        # Rows and slices have the names of their weights, by which a task may choose their group.
        known = [(whole_weight(name), value) for name, value in named]
        model = as_one([part.module for part in self.parts])
        self.optimizer: torch.optim.Optimizer | None = build_optimizer(self.task, known, model) if named else None
        """None if a stage trains nothing: it has only frozen layers, or layers without weights."""
        self.scheduler = None if self.optimizer is None else build_scheduler(self.task, self.optimizer)

    def _make_room(self, totals: StepTotals) -> None:
        """Make room for the step's metrics in the next steps; a part of the state, so that all workers agree."""
        if len(totals.metrics) > self.counts.get(METRICS, 0):
            self.counts[METRICS] = len(totals.metrics)
