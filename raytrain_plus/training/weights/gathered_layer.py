"""Weights that have memory only while their layer computes: `parallel.sharded: full`.

Each worker has some rows of each weight, as the parameters of its optimizer (`trained`). Before a layer computes, its
weights get memory, and each worker sends the rows that it is to send; afterwards the memory is free again. The weights
themselves stay the same objects, so that what autograd has kept of them in a forward pass is there again in the
backward pass. That is the third stage of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from raytrain_plus.membership.owners import senders
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.weights.optimized_rows import Trained
from raytrain_plus.training.weights.row_allgather import Exchange, Spread


def free_weight(weight: nn.Parameter) -> None:
    """Give up the memory of a weight, whose values are lost."""
    weight.untyped_storage().resize_(0)


class GatheredLayer:
    """The weights of a model's layers, by the index of their layer."""

    def __init__(self, trained: Trained, layers: Sequence[Sequence[str]]) -> None:
        """Prepare; nothing has memory yet. `layers`: the names of the trained weights of each layer, in order."""
        self._trained = trained
        weights = dict(trained.weights)
        self._layers = [{name: weights[name] for name in names} for names in layers]
        self._spreads: list[Spread] | None = None
        self._under_way: dict[int, Exchange] = {}
        self._values: Mapping[Piece, torch.Tensor] | None = None
        """Other values of the rows held here than those of the weights."""

    def share(self, owners: Sequence[Pieces] | None) -> None:
        """Prepare for a world whose members have these rows, by rank; None if all have all."""
        for number in range(len(self._layers)):
            self.free(number)
        if owners is None:
            self._spreads = None
            return
        row_bytes, row_counts = self._trained.row_bytes, self._trained.row_counts
        numbered = dict(zip(map(str, range(len(owners))), owners, strict=True))
        self._spreads = []
        for layer in self._layers:
            rows = Pieces.of(piece for piece in self._trained.rows if piece.name in layer)
            # Of each layer, all members send about equally much.
            self._spreads.append(Spread(list(senders(rows, row_bytes, numbered).values()), row_counts))

    @contextmanager
    def holding(self, values: Mapping[Piece, torch.Tensor]) -> Iterator[None]:
        """Gather these values of the rows held here instead while the context is open."""
        self._values = values
        try:
            yield
        finally:
            self._values = None

    def begin(self, layer: int, context: StepContext) -> None:
        """Begin to gather a layer; its weights have memory from now on."""
        weights = {name: value.data for name, value in self._layers[layer].items()}
        for value in weights.values():
            value.untyped_storage().resize_(value.nbytes)
        for piece, parameter, place in self._trained.places(weights):
            place.copy_(parameter.detach() if self._values is None else self._values[piece], non_blocking=True)
        if self._spreads is not None and weights:
            what = f"the weights of layer {layer + 1} of {len(self._layers)}"
            self._under_way[layer] = self._spreads[layer].begin(weights, f"layer.{layer}", what, context)

    def finish(self, layer: int) -> None:
        """Wait until all of a layer's weights are here. Raises the errors of `StepContext.wait`."""
        if (exchange := self._under_way.pop(layer, None)) is not None:
            exchange.finish()

    def free(self, layer: int) -> None:
        """Give up the memory of a layer's weights, also if they are being gathered for a world that has ended."""
        self._under_way.pop(layer, None)
        for weight in self._layers[layer].values():
            free_weight(weight)
