"""The weights that a worker's optimizer changes: those of the model, their masters, or rows of either.

Where the optimizer's state is sharded, the optimizer gets rows of the weights as parameters of their own, which share
the memory of the weights. A master (`masters`) has no memory besides its rows. The rows of other workers are not
changed here: `spread` brings their weights. Weights that have memory only while their layer computes (`gathered`) have
masters all of them, and so have weights whose optimizer is in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from raytrain_plus.device_copies import StateCopies, host_room
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.torch_compat import copy_each

Named = Sequence[tuple[str, nn.Parameter]]


class _Part(NamedTuple):
    """A parameter of the optimizer, and the rows of the model's weight that it changes."""

    piece: Piece
    parameter: nn.Parameter
    weight: nn.Parameter
    rows: slice | None
    """None for all rows."""
    master: bool
    """Whether the parameter has memory of its own."""

    @property
    def of_weight(self) -> torch.Tensor:
        """Those rows of the weight."""
        weight = self.weight.detach()
        return weight if self.rows is None else weight[self.rows]


def row_counts_of(named: Named, undivided: Collection[str]) -> dict[str, int]:
    """Return how many rows each weight has that can belong to different workers; one if it is not divided."""
    return {name: 1 if name in undivided or not value.dim() else max(1, len(value)) for name, value in named}


class Trained:
    """See the module docstring."""

    def __init__(
        self,
        named: Named,
        masters: Mapping[str, nn.Parameter] | None = None,
        undivided: Collection[str] = (),
        *,
        gathered: bool = False,
        copies: StateCopies | None = None,
    ) -> None:
        """Begin with all rows of all weights; with none if they are gathered.

        `named`: the trained parameters of the model. `masters`: those of some weights, by name. `undivided`: the
        weights that the optimizer changes rightly only as a whole. `gathered`: whether the weights have memory only
        while their layer computes; then their rows are masters, in the dtypes of `masters` or their own. `copies`:
        copies gradients to the host, if the masters are there.
        """
        self.gathered = gathered
        self.copies = copies
        self._arriving: list[Callable[[], None]] = []
        """Wait for copies between the host and its device that are under way."""
        self.weights = list(named)
        self.row_counts = row_counts_of(named, undivided)
        """How many rows each weight has: see `row_counts_of`."""
        self.mastered = frozenset(dict(named) if gathered else masters or ())
        """The weights that have masters."""
        self.dtypes = {name: value.dtype for name, value in named} | {
            name: value.dtype for name, value in (masters or {}).items()
        }
        """The dtype in which each weight is changed."""
        self.rows = Pieces.of(Piece(name, 0, count) for name, count in self.row_counts.items())
        """All rows of all weights."""
        self.owned = self.rows
        """Those that are changed here."""
        masters = masters or {}
        self._take(
            [
                _Part(Piece(name, 0, self.row_counts[name]), masters.get(name, value), value, None, name in masters)
                for name, value in named
            ]
        )
        if gathered:
            self.own(Pieces())

    @property
    def keeps_gradients(self) -> bool:
        """Whether the optimizer's parameters have copies of their gradients."""
        return self.gathered or self.copies is not None

    @property
    def everything(self) -> bool:
        """Whether all rows are changed here."""
        return self.owned == self.rows

    @property
    def row_bytes(self) -> dict[str, int]:
        """The bytes of a row of each weight."""
        return {name: value.nbytes // max(1, self.row_counts[name]) for name, value in self.weights}

    @property
    def pieces(self) -> list[Piece]:
        """The rows that each of the optimizer's parameters is; empty for weights of which no row is changed here."""
        return [part.piece for part in self._parts]

    @property
    def shared(self) -> Named:
        """The weights that are the same on all workers: those without masters."""
        return [(name, value) for name, value in self.weights if name not in self.mastered]

    def own(self, owned: Pieces) -> None:
        """Change these rows from now on. Masters keep their values only if they had all rows, and are not gathered."""
        before = dict(self.named) if self.everything and not self.gathered else {}
        taken: dict[str, list[Piece]] = {}
        for piece in owned:
            taken.setdefault(piece.name, []).append(piece)
        # The optimizer gets rows of each weight, so that its groups are the same on all workers.
        self._take(
            [
                self._part(piece, value, before.get(name))
                for name, value in self.weights
                for piece in taken.get(name) or [Piece(name, 0, 0)]
            ]
        )
        self.owned = owned

    def _take(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self.named: Named = [(part.piece.name, part.parameter) for part in parts]
        """What the optimizer gets, under the names of the weights."""
        self._of_weight: dict[str, list[_Part]] = {}
        for part in parts:
            self._of_weight.setdefault(part.piece.name, []).append(part)

    def _part(self, piece: Piece, weight: nn.Parameter, master: nn.Parameter | None) -> _Part:
        name, first, last = piece
        at = None if (first, last) == (0, self.row_counts[name]) else slice(first, last)
        if not weight.dim() and at is not None:
            return _Part(piece, nn.Parameter(self._room((0,), name, weight)), weight, None, master=True)
        part = _Part(piece, weight, weight, at, master=name in self.mastered)
        if self.gathered:
            # Their values come from other workers, from a checkpoint, or from `put`.
            shape = weight.shape if at is None else (last - first, *weight.shape[1:])
            return part._replace(parameter=nn.Parameter(self._room(shape, name, weight).zero_()))
        if not part.master:
            return part if at is None else part._replace(parameter=nn.Parameter(part.of_weight))
        if master is not None and at is None:
            return part._replace(parameter=nn.Parameter(master.detach()))
        values = part.of_weight if master is None else master.detach()[at]
        return part._replace(parameter=nn.Parameter(self._room(values.shape, name, weight).copy_(values)))

    def _room(self, shape: Sequence[int], name: str, weight: nn.Parameter) -> torch.Tensor:
        """Return memory for a master."""
        if self.copies is not None:
            return host_room(shape, self.dtypes[name], weight.device)
        return torch.empty(tuple(shape), dtype=self.dtypes[name], device=weight.device)

    def places(self, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[Piece, nn.Parameter, torch.Tensor]]:
        """Yield the optimizer's parameters that are rows of these weights: which, parameter, and the rows there."""
        for weight, whole in weights.items():
            for part in self._of_weight[weight]:
                # What stands for no rows of a weight has no values; nor has an empty weight.
                if part.parameter.numel() or not whole.numel():
                    yield part.piece, part.parameter, whole if part.rows is None else whole[part.rows]

    def put(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take the values of the rows changed here from these weights."""
        for _, parameter, rows in self.places(weights):
            parameter.data.copy_(rows)

    def keep_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give the optimizer's parameters copies of their rows of these gradients, by weight.

        Copies to the host are under way until `await_copies`; the gradients must not change before.
        """
        kept = [(parameter, rows) for _, parameter, rows in self.places(gradients)]
        if self.copies is None:
            for parameter, rows in kept:
                parameter.grad = rows.to(parameter.dtype, copy=True)
            return
        for parameter, rows in kept:
            if parameter.grad is None:
                parameter.grad = host_room(parameter.shape, parameter.dtype, rows.device)
        rooms = [parameter.grad for parameter, _ in kept if parameter.grad is not None]
        self._arriving.append(self.copies.copy([rows for _, rows in kept], rooms))

    def await_copies(self) -> None:
        """Wait until copies between the host and its device have ended, so that what is on the host may change."""
        for wait in self._arriving:
            wait()
        self._arriving.clear()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the copies of the gradients."""
        self.await_copies()
        for _, parameter in self.named:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def parameters_of(self, weight: str) -> list[nn.Parameter]:
        """Return the optimizer's parameters that are rows of a weight."""
        return [part.parameter for part in self._of_weight[weight]]

    def forget_gradients(self) -> None:
        """Take the copies from the parameters."""
        self.await_copies()
        for _, parameter in self.named:
            parameter.grad = None

    def share_gradients(self) -> None:
        """Let each parameter of the optimizer have the gradient of its rows, unless it has a copy of them."""
        self.await_copies()
        for _, parameter, weight, rows, _ in () if self.keeps_gradients else self._parts:
            if parameter is weight:
                continue
            gradient = weight.grad if parameter.numel() or not weight.numel() else None
            parameter.grad = gradient if gradient is None or rows is None else gradient[rows]

    def copy_to_model(self) -> None:
        """Write the masters held here into the model, rounded, unless its weights are to be gathered."""
        if not self.mastered or self.gathered:
            return
        own = [part for part in self._parts if part.master and part.parameter.numel()]
        weights, masters = [part.of_weight for part in own], [part.parameter.detach() for part in own]
        with torch.no_grad():
            if self.copies is None:
                copy_each(weights, masters)
                return
            self._arriving.append(self.copies.copy(masters, weights))
        # What is computed from now on sees the new weights.
        self.copies.before_change()

    def whole(self, values: Mapping[Piece, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors of the size of the weights with these values of the rows held here, and the weights' own."""
        found: dict[str, torch.Tensor] = {}
        for part in self._parts:
            whole = found.get(part.piece.name)
            if whole is None:
                whole = found[part.piece.name] = part.weight.detach().to(part.parameter.dtype, copy=True)
            if part.parameter.numel():
                (whole if part.rows is None else whole[part.rows]).copy_(values[part.piece])
        return found
