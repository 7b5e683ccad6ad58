"""The sums of a step whose layers are summed one after the other: a layer's gradients have memory only until then.

Once a layer's sums are complete, they become gradients, whose norms are measured; of the gradients, a worker keeps the
rows that its optimizer changes. Tied weights are an exception: their gradients are added, so they are kept whole until
all layers are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from raytrain_plus.collective.exact import ExactSum
from raytrain_plus.collective.world import Work
from raytrain_plus.device_copies import Numbers, read_together
from raytrain_plus.parallel.gradients import Gradients
from raytrain_plus.training.exchange import header
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.update.step_sums import ExchangeTied, GradientNorms, MeanGradients, StepSums
from raytrain_plus.training.weights.first_bucket import Rider
from raytrain_plus.training.weights.model_part import ModelPart
from raytrain_plus.training.weights.norms import Norms
from raytrain_plus.training.weights.optimized_rows import Trained


class LayerSums(StepSums):
    """See the module docstring. `end_layer` is called for each part, the last one first."""

    def __init__(
        self,
        parts: Sequence[ModelPart],
        trained: Trained,
        tied: Mapping[str, str],
        head: Gradients,
        *,
        shards: int,
        device: torch.device,
        clip_value: float | None = None,
    ) -> None:
        """Prepare the sums of these parts, one for each layer; `head` has no gradients, and carries the rider."""
        super().__init__(parts, trained, tied, shards=shards, device=device, clip_value=clip_value)
        self.head = head
        self.rider = Rider(head, [part.buffers for part in parts], shards)
        self._kept = {name for names in self._tied for name in names}
        """The tied weights."""
        self._read: list[ExactSum] = []
        self._measured: list[tuple[list[str], Norms]] = []
        """Names and norms of the gradients that are summed."""
        self._absent: set[str] = set()
        self._flushed = 0

    @property
    def _exact(self) -> list[ExactSum]:
        return [*self._read, *(part.buffers.exact for part in self._parts if part.buffers.exact)]

    def begin(
        self,
        scales: Mapping[str, int],
        metrics: int,
        members: int,
        *,
        buffers: bool = True,
        loss_factor: float = 1.0,
    ) -> None:
        """See `StepSums.begin`."""
        for part in self._parts:
            part.gradients.free()
        for name, value in self._trained:
            if name in self._kept:
                value.grad = None
        self._rows.forget_gradients()
        self._read, self._measured, self._absent, self._flushed = [], [], set(), 0
        self._scales = scales
        super().begin(scales, metrics, members, buffers=buffers, loss_factor=loss_factor)
        self.head.begin(scales)

    def begin_layer(self, part: ModelPart) -> None:
        """Make room for a layer's gradients."""
        part.gradients.allocate()
        part.gradients.begin(self._scales)

    def weight(self) -> float:
        """Return the weight of all shards, once the header is summed."""
        summed, _ = self.rider.read()
        return header.decode(summed).weight

    def end_layer(self, part: ModelPart, works: Sequence[Work], weight: float, what: str, context: StepContext) -> None:
        """Wait for a layer's sums, and turn them into gradients, given the weight of all shards."""
        gradients = part.gradients
        context.wait(works, what)
        exact = gradients.exact
        read_together([*gradients.unread, *(one.magnitudes for one in exact)])
        self._absent |= gradients.without_gradient()
        self._flushed += gradients.flushed()
        if weight and all(one.read().settled for one in exact):
            gradients.take_means(weight * self.loss_factor)
            self._keep(part)
        for one in exact:
            one.keep_readings()
        self._read += exact
        kept = [
            (value, value.grad.clone())
            for name, value in self._of(part)
            if name in self._kept and value.grad is not None
        ]
        gradients.free()
        for value, gradient in kept:
            value.grad = gradient

    def _of(self, part: ModelPart) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, value) for name, value in part.parameters if value.requires_grad)

    def _keep(self, part: ModelPart) -> None:
        """Measure the gradients of a layer, and keep the rows of the optimizer here, but for tied weights."""
        found = {
            name: value.grad for name, value in self._of(part) if name not in self._kept and value.grad is not None
        }
        self._clamp(found.values())
        self._measured.append((list(found), Norms(list(found.values()))))
        self._rows.keep_gradients(found)

    def read_with(self, others: Iterable[Numbers]) -> None:
        """See `StepSums.read_with`."""
        read_together([*self.rider.unread, *(exact.magnitudes for exact in self._exact), *others])

    def overflowed(self) -> list[str]:
        """See `StepSums.overflowed`."""
        return [name for exact in self._read for name in exact.overflowed()]

    def without_gradient(self) -> frozenset[str]:
        """See `StepSums.without_gradient`."""
        return frozenset(self._absent)

    def flushed(self) -> int:
        """See `StepSums.flushed`."""
        return self._flushed

    def means(self, weight: float, exchange: ExchangeTied, *, settled: bool = True) -> MeanGradients:
        """See `StepSums.means`; all gradients but those of tied weights are handed over and measured already."""
        left = self._add_tied(exchange, settled, self.without_gradient())
        tied = {name: value.grad for name, value in self._trained if name in self._kept and value.grad is not None}
        if settled and tied:
            self._clamp(tied.values())
            measured = [name for name in tied if name not in self._copies]
            self._measured.append((measured, Norms([tied[name] for name in measured])))
            self._rows.keep_gradients(tied)
        for name, value in self._trained:
            if name in self._kept:
                value.grad = None
        return MeanGradients(left, GradientNorms([], [part.buffers for part in self._parts], self._measured))
