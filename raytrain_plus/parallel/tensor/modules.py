"""Modules that are cut into slices: a linear layer by columns or rows, an embedding by its vocabulary.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019. Each
slice makes a matrix product of its own, of the same shape wherever it is hosted; what follows them is computed for all
hosted slices at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.positions import cut, divided, each_slice, gathered, own_of_sum
from raytrain_plus.parallel.tensor.slice_plan import SliceKind


class Leaf(nn.Module):
    """A slice of one linear layer or embedding."""

    weight: nn.Parameter
    bias: nn.Parameter | None


class SharedInput:
    """Where the columns of one module meet: those that get the same input share its gradient's sum.

    `divides`: outside of what is cut, a worker has the positions of its slices alone (`positions`). They are gathered
    for the columns; or, if `enters`, for the module itself, whose code then sees the whole length.
    """

    def __init__(self, link: Link, count: int, *, divides: bool = False, enters: bool = False) -> None:
        self.link = link
        self.divides = divides
        self._count = count
        self._spread = _Spread.apply if enters or not divides else gathered
        # The entrance, which has gathered the positions, sums their gradient over the other workers.
        self._of = Link() if enters else link
        self._input: torch.Tensor | None = None
        self._recorded = True
        self._copies: tuple[torch.Tensor, ...] = ()

    def copies(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a copy of the input for each hosted slice; the gradients of all copies are summed once."""
        # Copies that were made without gradients have none.
        if self._input is not given or self._recorded is not torch.is_grad_enabled():
            self._input, self._copies = given, self._spread(given, self._count, self._of)
            self._recorded = torch.is_grad_enabled()
        return self._copies

    def total(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """Return the sum over all slices, with the bias, given the part of each hosted slice."""
        if not self.divides:
            total = summed(self.link, parts)
            return total if bias is None else total + bias
        total = own_of_sum(parts, self.link)
        return total if bias is None else each_slice(torch.add, total, [bias], self.link, self._count)

    def end(self) -> None:
        """Forget the input: what uses it has been computed."""
        self._input, self._copies = None, ()


class Column(nn.Module):
    """A linear layer whose outputs are divided between slices: (..., in) -> (..., out of the hosted slices).

    With `gathers` it returns the outputs of all slices; with `keeps` only where no gradients are computed, as in
    evaluations, and else says whose they are (`hosted_by`).
    """

    def __init__(
        self, slices: Sequence[Leaf], meeting: SharedInput, fused: int, in_features: int, *, gathers: bool, keeps: bool
    ) -> None:
        """Compute with `slices`, which have `weight` and `bias`."""
        super().__init__()
        # In a tuple: they are modules of the slice to which they belong.
        self._slices = tuple(slices)
        self._meeting = meeting
        self.cut: tuple[SliceKind, int] = ("column", fused)
        self._fused = fused
        self._gathers = gathers
        self._keeps = keeps
        self.in_features = in_features

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """See the class."""
        copies = self._meeting.copies(given)
        outputs = [F.linear(one, part.weight, part.bias) for one, part in zip(copies, self._slices, strict=True)]
        if self._keeps and torch.is_grad_enabled():
            self._meeting.end()
            return _kept(_join(outputs, self._fused), self._meeting.link, len(outputs))
        if not (self._gathers or self._keeps):
            return _join(outputs, self._fused)
        self._meeting.end()
        gathered: torch.Tensor = _Gather.apply(self._meeting.link, self._fused, *outputs)
        return gathered


@dataclass(frozen=True, slots=True)
class Hosted:
    """Which of a model's outputs a worker has: those of its slices."""

    link: Link
    starts: tuple[int, ...]
    """The first output of each hosted slice."""
    whole: int
    """The number of all outputs."""


def hosted_by(outputs: torch.Tensor) -> Hosted | None:
    """Return whose outputs these are, if a column has kept them with their slices; None for all others."""
    found: Hosted | None = getattr(outputs, _HOSTED, None)
    return found


_HOSTED = "hosted_slices"


def _kept(outputs: torch.Tensor, link: Link, count: int) -> torch.Tensor:
    """Return the outputs of `count` hosted slices, with what `hosted_by` returns for them."""
    size = outputs.shape[-1] // count
    first = link.rank * outputs.shape[-1]
    starts = tuple(first + number * size for number in range(count))
    setattr(outputs, _HOSTED, Hosted(link, starts, outputs.shape[-1] * link.ranks))
    return outputs


class Row(nn.Module):
    """A linear layer whose inputs are divided between slices: (..., in of the hosted slices) -> (..., out)."""

    def __init__(
        self, slices: Sequence[Leaf], meeting: SharedInput, bias: nn.Parameter | None, out_features: int
    ) -> None:
        """Compute with `slices`, which have `weight`; the `bias` is added once, to their sum."""
        super().__init__()
        self._slices = tuple(slices)
        self._meeting = meeting
        self.cut: tuple[SliceKind, int] = ("row", 1)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)
        self.out_features = out_features

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """See the class."""
        self._meeting.end()
        inputs = cut(given, len(self._slices), -1)
        parts = [F.linear(one, part.weight) for one, part in zip(inputs, self._slices, strict=True)]
        return self._meeting.total(parts, self.bias)


class Vocabulary(nn.Module):
    """An embedding whose rows are divided between slices: (...) of integers -> (..., width)."""

    def __init__(
        self,
        slices: Sequence[Leaf],
        numbers: Sequence[int],
        meeting: SharedInput,
        rows: int,
        whole: int,
        padding: int | None,
    ) -> None:
        """Look up in `slices`, of `rows` rows each, out of `whole`; `numbers`: their places.

        `padding`: a row without a gradient.
        """
        super().__init__()
        self._slices = tuple(slices)
        self.cut: tuple[SliceKind, int] = ("vocabulary", 1)
        self._starts = [number * rows for number in numbers]
        self._meeting = meeting
        self._rows = rows
        self._whole = whole
        self._padding = padding

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """See the class."""
        parts = [self._part(given, part.weight, start) for part, start in zip(self._slices, self._starts, strict=True)]
        return self._meeting.total(parts, None)

    def _part(self, given: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
        places = given - start
        # The first and the last slice look up numbers outside the vocabulary, too, which raises an error.
        others = torch.zeros_like(places, dtype=torch.bool)
        if start:
            others |= places < 0
        if start + self._rows < self._whole:
            others |= places >= self._rows
        padding = None if self._padding is None else self._padding - start
        own = padding if padding is not None and 0 <= padding < self._rows else None
        found = F.embedding(places.masked_fill(others, 0), weight, own)
        return found.masked_fill(others.unsqueeze(-1), 0)


def summed(link: Link, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum over all slices, given the part of each hosted one; each part gets its gradient."""
    total: torch.Tensor = _Sum.apply(link, *parts)
    return total


def part_of(weight: torch.Tensor, kind: str, fused: int, number: int, slices: int) -> torch.Tensor:
    """Return slice `number` of a weight (rows, columns), or of a bias (rows) of columns, as a view or a copy.

    >>> part_of(torch.arange(12), "column", 3, 1, 2).tolist(), part_of(torch.eye(4), "row", 1, 3, 4).shape
    ([2, 3, 6, 7, 10, 11], torch.Size([4, 1]))
    """
    if kind == "row":
        return weight.chunk(slices, 1)[number]
    each = weight.reshape(fused, slices, -1, *weight.shape[1:])[:, number]
    return each.reshape(-1, *weight.shape[1:])


def _join(parts: Sequence[torch.Tensor], fused: int) -> torch.Tensor:
    joined: torch.Tensor = _Join.apply(fused, *parts)
    return joined


def _joined(parts: Sequence[torch.Tensor], fused: int) -> torch.Tensor:
    """Put outputs next to each other, those of each of the `fused` projections by themselves."""
    if len(parts) == 1:
        return parts[0].view_as(parts[0])
    if fused == 1:
        return torch.cat(list(parts), -1)
    each = torch.stack([part.reshape(*part.shape[:-1], fused, -1) for part in parts], -2)
    return each.reshape(*parts[0].shape[:-1], -1)


def _divided(whole: torch.Tensor, fused: int, count: int) -> list[torch.Tensor]:
    """Return the part of each slice, each in memory of its own: the inverse of `_joined`."""
    if fused == 1 or count == 1:
        return list(divided(whole, count, -1))
    each = whole.reshape(*whole.shape[:-1], fused, count, -1)
    return [each[..., number, :].reshape(*whole.shape[:-1], -1) for number in range(count)]


class _Spread(torch.autograd.Function):
    """One tensor for all slices of all workers; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, count: int, link: Link) -> tuple[torch.Tensor, ...]:
        ctx.link = link
        return tuple(given.view_as(given) for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.link.sum(gradients), None, None


class _Sum(torch.autograd.Function):
    """The sum over all slices of all workers; each has its gradient."""

    @staticmethod
    def forward(ctx: Any, link: Link, *parts: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parts)
        total = link.sum(parts)
        return total.view_as(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *([gradient] * ctx.count)


class _Gather(torch.autograd.Function):
    """The outputs of all slices of all workers next to each other."""

    @staticmethod
    def forward(ctx: Any, link: Link, fused: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.link, ctx.fused, ctx.count = link, fused, len(parts)
        return _joined(link.gather(parts), fused)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        parts = _divided(gradient, ctx.fused, ctx.count * ctx.link.ranks)
        first = ctx.link.rank * ctx.count
        return None, None, *parts[first : first + ctx.count]


class _Join(torch.autograd.Function):
    """The outputs of the hosted slices next to each other; their gradients are in memory of their own."""

    @staticmethod
    def forward(ctx: Any, fused: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.fused, ctx.count = fused, len(parts)
        return _joined(parts, fused)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *_divided(gradient, ctx.fused, ctx.count)
