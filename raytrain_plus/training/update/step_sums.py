"""The sums of a step over all shards, and what they show: the step's totals, its gradient norms, its faults."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from raytrain_plus.collective.exact import ExactSum, Reading
from raytrain_plus.collective.world import Work
from raytrain_plus.device_copies import Numbers, from_host, read_together
from raytrain_plus.parallel.pipeline.layout import tied_groups
from raytrain_plus.torch_compat import clamp_each
from raytrain_plus.training.exchange import header
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.step_metrics import OwnMetrics, check_same, means, number_of
from raytrain_plus.training.exchange.verdict import BUFFER, Fault
from raytrain_plus.training.update.fault_search import FaultSearch
from raytrain_plus.training.weights.buffers import Buffers
from raytrain_plus.training.weights.first_bucket import Rider
from raytrain_plus.training.weights.model_part import ModelPart
from raytrain_plus.training.weights.norms import Norms
from raytrain_plus.training.weights.optimized_rows import Trained

ExchangeTied = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Returns the gradients of all tied parameters of the replica, given those held here."""


class MeanGradients(NamedTuple):
    """The gradients of a step."""

    absent: frozenset[str]
    """The parameters held here that got none."""
    norms: GradientNorms


class StepSums:
    """The gradients and buffer sums of the parts that a worker holds; every member of its world calls it alike."""

    def __init__(
        self,
        parts: Sequence[ModelPart],
        trained: Trained,
        tied: Mapping[str, str],
        *,
        shards: int,
        device: torch.device,
        clip_value: float | None = None,
    ) -> None:
        """Prepare the sums of these parts.

        `trained`: the weights of the parts that are trained. `tied`: parameters of the whole model that are copies ->
        the parameters they copy. `clip_value`: the largest magnitude of an element of the gradient, if it has one.
        """
        self._parts = parts
        self._rows = trained
        self._trained = trained.weights
        self._copies = tied.keys()
        own = dict(self._trained)
        self._tied = [names for names in tied_groups(tied) if not own.keys().isdisjoint(names)]
        self._shards = shards
        self._device = device
        self._clip_value = clip_value
        self.loss_factor = 1.0
        """By what each microbatch's loss is multiplied in this step; its gradients are divided by it."""
        self.rider = Rider(parts[0].gradients, [part.buffers for part in parts], shards)

    @property
    def _exact(self) -> list[ExactSum]:
        return [
            *(exact for part in self._parts for exact in part.gradients.exact),
            *(part.buffers.exact for part in self._parts if part.buffers.exact),
        ]

    def begin(
        self,
        scales: Mapping[str, int],
        metrics: int,
        members: int,
        *,
        buffers: bool = True,
        loss_factor: float = 1.0,
    ) -> None:
        """Clear all sums.

        `scales`: the exponents of the quanta of exact sums. `metrics`: how many of each shard there is room for.
        `members`: those of the world. `buffers`: whether any may change. `loss_factor`: see the attribute.
        """
        self.loss_factor = loss_factor
        self.rider.fit(metrics, members, buffers=buffers)
        for part in self._parts:
            part.gradients.begin(scales)
            if buffers:
                part.buffers.begin_step(scales, loss_factor)

    def wait(self, works: Sequence[Work], step: int, context: StepContext) -> None:
        """Wait for all sums."""
        context.wait(works, f"the sums of step {step}")
        self.rider.read_buffers()

    def read_with(self, others: Iterable[Numbers]) -> None:
        """Read at once what the host must know of the sums, and these numbers."""
        of_parts = (one for part in self._parts for one in part.gradients.unread)
        magnitudes = (exact.magnitudes for exact in self._exact)
        read_together([*self.rider.unread, *of_parts, *magnitudes, *others])

    def totals(self, own: OwnMetrics, step: int, context: StepContext) -> header.StepTotals:
        """Return the totals in the header that the sums carry.

        `own`: the metrics of this replica's shards. Raises `TrainingError` if shards have different metrics.
        """
        summed, table = self.rider.read()
        totals = header.decode(summed)
        check_same(totals.signatures, step)
        count = number_of(totals.signatures)
        if not count:
            return totals
        names: Sequence[str] = own.names
        if len(totals.signatures) < self._shards:
            # All rows of a shard are skipped, and perhaps all of a member.
            names = self._shared_names(names, step, context)
        if table.shape[1] < count:
            # Every member finds this alike. From the next step on there is room.
            sums = np.zeros((self._shards, count)) if own.sums is None else own.sums
            total = from_host(torch.from_numpy(sums.copy()), self._device)
            context.reduce(total, "metrics", f"the metrics of step {step}")
            table = total.cpu().numpy()
        return replace(totals, metrics=means(names, table, totals.weight))

    def _shared_names(self, own: Sequence[str], step: int, context: StepContext) -> Sequence[str]:
        """Return the names of a step's metrics, which members without rows do not know."""
        said = json.dumps(own).encode() if own else b""
        length = torch.tensor([len(said)], device=self._device)
        context.reduce(length, "metrics.length", f"the metrics of step {step}", "max")
        text = torch.zeros(int(length), dtype=torch.int64)
        text[: len(said)] = torch.tensor(list(said), dtype=torch.int64)
        text = text.to(self._device)
        context.reduce(text, "metrics.names", f"the metrics of step {step}", "max")
        names: list[str] = json.loads(bytes(text.tolist()))
        return names

    def read(self) -> Reading:
        """Return whether all exact sums are settled, and the next grids; without exact sums, all is settled."""
        readings = [exact.read() for exact in self._exact]
        return Reading(
            all(reading.settled for reading in readings),
            {name: scale for reading in readings for name, scale in reading.scales.items()},
        )

    def overflowed(self) -> list[str]:
        """Return the parameters whose exact sums are not finite."""
        return [name for part in self._parts for exact in part.gradients.exact for name in exact.overflowed()]

    def measure(self, step: int, context: StepContext) -> tuple[dict[str, int], list[str]]:
        """Return the grids that fit this step's values, and the values that are not
        finite, named as squared norms are.
        """
        sums = self._exact
        largest = torch.from_numpy(np.concatenate([exact.largest() for exact in sums])).to(self._device)
        context.reduce(largest, "exact.largest", f"the largest values of step {step}", "max")
        parts = np.split(largest.cpu().numpy(), np.cumsum([len(exact.names) for exact in sums])[:-1])
        scales: dict[str, int] = {}
        bad: list[str] = []
        of_buffers = [part.buffers.exact for part in self._parts]
        for exact, largest_of in zip(sums, parts, strict=True):
            scales |= exact.scales_from(largest_of)
            prefix = BUFFER if exact in of_buffers else ""
            bad += [prefix + name for name in exact.not_finite(largest_of)]
        return scales, bad

    def first_fault(self, search: FaultSearch, chunks: Sequence[int], step: int, context: StepContext) -> Fault | None:
        """Return the first fault that the members of this world have found. `chunks`: the parts' indices."""
        trained = [name for name, _ in self._trained]
        parts = zip(chunks, self._parts, strict=True)
        chunk_of = {name: chunk for chunk, part in parts for name, _ in part.parameters}
        # For each shard, the parameter's number, counted from 1: of several, the last one is nearest to the loss.
        found = torch.zeros(self._shards, dtype=torch.int64, device=self._device)
        for fault in search.found():
            found[fault.shard] = max(int(found[fault.shard]), trained.index(fault.parameter) + 1)
        context.reduce(found, "faults", f"the search for non-finite gradients in step {step}", "max")
        for shard, number in enumerate(found.tolist()):
            if number:
                name = trained[number - 1]
                return Fault(shard, chunk_of[name], name)
        return None

    def without_gradient(self) -> frozenset[str]:
        """Return the names of the parameters held here that no shard of the step gave a gradient."""
        return frozenset[str]().union(*(part.gradients.without_gradient() for part in self._parts))

    @contextmanager
    def without(self, names: Collection[str]) -> Iterator[None]:
        """Hide the gradients of these parameters while the context is open."""
        hidden = [
            (value, value.grad)
            for name, weight in self._trained
            if name in names
            for value in (self._rows.parameters_of(name) if self._rows.keeps_gradients else [weight])
        ]
        for value, _ in hidden:
            value.grad = None
        try:
            yield
        finally:
            for value, gradient in hidden:
                value.grad = gradient

    def flushed(self) -> int:
        """Return how many values of the sums, other than zero, were sent as zero by any worker."""
        return sum(part.gradients.flushed() for part in self._parts)

    def means(self, weight: float, exchange: ExchangeTied, *, settled: bool = True) -> MeanGradients:
        """Turn the sums into gradients, hand them to the optimizer, and measure them.

        `weight`: that of all shards. `exchange` returns the gradients of all tied parameters of the replica, given
        those held here. Sums that are not `settled` are left as they are, and are exchanged with other stages, which
        wait for them, all the same.
        """
        for part in self._parts if settled else ():
            part.gradients.take_means(weight * self.loss_factor)
        absent = self._add_tied(exchange, settled, self.without_gradient())
        trained = [(name, _gradient(value)) for name, value in self._trained]
        if settled:
            self._clamp(gradient for _, gradient in trained)
            if self._rows.keeps_gradients:
                self._rows.keep_gradients(dict(trained))
        # Tied parameters count once.
        measured = [(name, gradient) for name, gradient in trained if name not in self._copies]
        return MeanGradients(absent, GradientNorms(measured, [part.buffers for part in self._parts]))

    def _add_tied(self, exchange: ExchangeTied, settled: bool, absent: frozenset[str]) -> frozenset[str]:
        """Give tied parameters the sum of their gradients, in the order of names, on whichever stage they are.

        `absent`: see `without_gradient`. Returns those that are still without a gradient.
        """
        if not self._tied:
            return absent
        own = dict(self._trained)
        held = [name for names in self._tied for name in names if name in own]
        found = exchange({name: _gradient(own[name]) for name in held if name not in absent})
        for names in self._tied if settled else ():
            given = [found[name] for name in names if name in found]
            if not given:
                continue
            total = sum(given[1:], given[0])
            for name in names:
                if name in own:
                    _gradient(own[name]).copy_(total)
            absent = absent.difference(names)
        return absent

    def _clamp(self, gradients: Iterable[torch.Tensor]) -> None:
        """Clamp the elements of some means; an infinite one becomes NaN, so that its step is refused as ever."""
        if self._clip_value is not None:
            clamp_each(list(gradients), self._clip_value)

    def scale(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        if self._rows.keeps_gradients:
            self._rows.scale_gradients(factor)
            return
        for part in self._parts:
            part.gradients.scale(factor)


class GradientNorms:
    """What the norms of a step's gradients, and of the changes of its buffers, show."""

    def __init__(
        self,
        gradients: Sequence[tuple[str, torch.Tensor]],
        buffers: Sequence[Buffers],
        measured: Sequence[tuple[Sequence[str], Norms]] = (),
    ) -> None:
        """Measure; `measured`: names and norms of other gradients."""
        self._measured = measured
        self._names = [name for name, _ in gradients]
        changes = [(one, change) for one in buffers for change in one.changes()]
        self._of_changes = [one for one, _ in changes]
        self._norms = Norms([*(gradient for _, gradient in gradients), *(change for _, change in changes)])

    @property
    def unread(self) -> list[Numbers]:
        """What `squares` reads."""
        return [*self._norms.unread, *(one for _, norms in self._measured for one in norms.unread)]

    def squares(self) -> dict[str, float]:
        """Return the squared norm of each parameter's gradient; NaN for buffers with non-finite sums."""
        read_together(self.unread)
        squares = self._norms.squares()
        found = {name: one for names, norms in self._measured for name, one in zip(names, norms.squares(), strict=True)}
        found |= zip(self._names, squares, strict=False)
        for buffers, square in zip(self._of_changes, squares[len(self._names) :], strict=True):
            if not math.isfinite(square):
                found |= {f"{BUFFER}{name}": math.nan for name in buffers.not_finite()}
        return found


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "gradients are views into buckets and never None"
    return parameter.grad
