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
from raytrain_plus.state.held import HeldRows
from raytrain_plus.state.weight_rows import WeightRows, rows_of, weight_of
from raytrain_plus.torch_compat import copy_each

Named = Sequence[tuple[str, nn.Parameter]]


class _Part(NamedTuple):
    """A parameter of the optimizer, and the rows of the model's weight that it changes."""

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
        self.named: Named = [(name, (masters or {}).get(name, value)) for name, value in named]
        """What the optimizer gets."""
        self._parts = [
            _Part(one, value, None, one is not value) for (_, one), (_, value) in zip(self.named, named, strict=True)
        ]
        self._of_weight = _by_weight(self.named, self._parts)
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
    def owned_rows(self) -> HeldRows | None:
        """The rows that are changed here; None if all are."""
        return None if self.everything else self.held_rows(self.owned)

    def held_rows(self, pieces: Pieces) -> HeldRows:
        """Return these rows as the state's tensors need them."""
        return HeldRows(rows_of(pieces, self.row_counts), self.row_counts)

    @property
    def shared(self) -> Named:
        """The weights that are the same on all workers: those without masters."""
        return [(name, value) for name, value in self.weights if name not in self.mastered]

    def own(self, owned: Pieces) -> None:
        """Change these rows from now on. Masters keep their values only if they had all rows, and are not gathered."""
        before = dict(self.named) if self.everything and not self.gathered else {}
        taken: dict[str, list[WeightRows]] = {}
        for rows in rows_of(owned, self.row_counts):
            taken.setdefault(rows.weight, []).append(rows)
        named, parts = [], []
        for name, value in self.weights:
            # The optimizer gets rows of each weight, so that its groups are the same on all workers.
            for rows in taken.get(name) or [WeightRows(name, 0, 0)]:
                part = self._part(name, value, rows, before.get(name))
                named.append((rows.name, part.parameter))
                parts.append(part)
        self.named, self._parts, self.owned = named, parts, owned
        self._of_weight = _by_weight(named, parts)

    def _part(self, name: str, weight: nn.Parameter, rows: WeightRows, master: nn.Parameter | None) -> _Part:
        at = None if rows.last is None else slice(rows.first, rows.last)
        if not weight.dim() and at is not None:
            return _Part(nn.Parameter(self._room((0,), name, weight)), weight, None, master=True)
        part = _Part(weight, weight, at, master=name in self.mastered)
        if self.gathered:
            # Their values come from other workers, from a checkpoint, or from `put`.
            shape = weight.shape if rows.last is None else (rows.last - rows.first, *weight.shape[1:])
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

    def places(self, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
        """Yield the optimizer's parameters that are rows of these weights: name, parameter, and the rows there."""
        for weight, whole in weights.items():
            for name, part in self._of_weight[weight]:
                # What stands for no rows of a weight has no values; nor has an empty weight.
                if part.parameter.numel() or not whole.numel():
                    yield name, part.parameter, whole if part.rows is None else whole[part.rows]

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
        return [part.parameter for _, part in self._of_weight[weight]]

    def forget_gradients(self) -> None:
        """Take the copies from the parameters."""
        self.await_copies()
        for _, parameter in self.named:
            parameter.grad = None

    def share_gradients(self) -> None:
        """Let each parameter of the optimizer have the gradient of its rows, unless it has a copy of them."""
        self.await_copies()
        for parameter, weight, rows, _ in () if self.keeps_gradients else self._parts:
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

    def whole(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors of the size of the weights with these values of the rows held here, and the weights' own.

        `values`: by the names of the optimizer's parameters.
        """
        found: dict[str, torch.Tensor] = {}
        for (name, parameter), part in zip(self.named, self._parts, strict=True):
            weight = weight_of(name)
            if weight not in found:
                found[weight] = part.weight.detach().to(parameter.dtype, copy=True)
            whole = found[weight]
            if parameter.numel():
                (whole if part.rows is None else whole[part.rows]).copy_(values[name])
        return found


def _by_weight(named: Named, parts: Sequence[_Part]) -> dict[str, list[tuple[str, _Part]]]:
    """Return the parts of each weight, with the names of their parameters."""
    found: dict[str, list[tuple[str, _Part]]] = {}
    for (name, _), part in zip(named, parts, strict=True):
        found.setdefault(weight_of(name), []).append((name, part))
    return found
