"""Layers between those that are cut: each slice computes some of the positions, with the whole weights.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022 (sequence parallelism). What
is divided is the second dimension from the end: the positions of (rows, length, width), or the heads that a slice has
of (rows, length, heads, width). Each slice computes by itself wherever it is hosted, and gradients of the weights are
summed over slices in the fixed tree, so that the bits do not depend on the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional as F

from raytrain_plus.errors import TaskError
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.slice_plan import DIVIDES, WHERE
from raytrain_plus.torch_compat import pytree


class Replicated(nn.Module):
    """A module whose weights all slices have: (..., own positions, width) -> (..., own positions, out)."""

    def __init__(self, module: nn.Module, link: Link, count: int) -> None:
        """Compute as `module`, whose parameters keep their names, once for each of `count` hosted slices."""
        super().__init__()
        # In a tuple: its parameters are this module's.
        self._module = (module,)
        self._link = link
        self._count = count
        for name, value in module.named_parameters(recurse=False):
            self.register_parameter(name, value)
        for name, child in module.named_children():
            self.add_module(name, child)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """See the class."""
        [module] = self._module
        module.training = self.training
        names, weights = [], []
        for name, value in self.named_parameters():
            names.append(name)
            weights.append(value)

        def work(part: torch.Tensor, *copies: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = functional_call(module, dict(zip(names, copies, strict=True)), (part,))
            return found

        return each_slice(work, given, weights, self._link, self._count)


class DividedDropout(nn.Module):
    """Dropout of the own positions: (..., own positions, width) -> the same.

    Every worker draws for all positions, so that the random numbers are those of one process.
    """

    def __init__(self, p: float, link: Link) -> None:
        super().__init__()
        self.p = p
        self._link = link

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if not self.training:
            return given
        own = given.shape[-2]
        shape = (*given.shape[:-2], own * self._link.ranks, given.shape[-1])
        factors = F.dropout(given.new_ones(shape), self.p)
        # A copy: a view would keep the factors of all positions until the backward pass.
        return given * factors.narrow(-2, own * self._link.rank, own).clone()


def each_slice(
    work: Callable[..., torch.Tensor], given: torch.Tensor, weights: Sequence[torch.Tensor], link: Link, count: int
) -> torch.Tensor:
    """Return what `work` makes of the positions of each of `count` hosted slices, and of copies of all `weights`."""
    each = copies(link, count, *weights) if weights else ()
    parts = cut(given, count, -2)
    found = [work(part, *each[number::count]) for number, part in enumerate(parts)]
    joined: torch.Tensor = _Join.apply(*found)
    return joined


def copies(link: Link, count: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return copies of each value for `count` hosted slices, those of the same value beside each other.

    Their gradients are summed over all slices of all workers, in one exchange; the values are of one dtype.
    """
    found: tuple[torch.Tensor, ...] = _Copies.apply(link, count, *values)
    return found


def gathered(given: torch.Tensor, count: int, link: Link) -> tuple[torch.Tensor, ...]:
    """Return a copy of all positions for each of `count` hosted slices, given the own ones.

    Its gradient is the sum over all slices of theirs, for the own positions.
    """
    copies: tuple[torch.Tensor, ...] = _Gather.apply(given, count, link)
    return copies


class Entrance:
    """Gathers the positions for a module that is cut, when it is called: a forward hook before it."""

    def __init__(self, name: str, link: Link) -> None:
        self._name = name
        self._link = link

    def __call__(self, _: nn.Module, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the arguments; of the first tensor of floating numbers, all positions.

        Raises `TaskError` if another one takes part in the backward pass: its gradient would be that of some slices.
        """
        values: dict[Any, Any] = {**dict(enumerate(arguments)), **named}
        tensors = [at for at, value in values.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
        for at in tensors[:1]:
            [values[at]] = gathered(values[at], 1, self._link)
        others = pytree.tree_leaves([value for at, value in values.items() if at not in tensors[:1]])
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in others):
            raise TaskError(
                f"'{self._name}', which is cut into slices, gets a second tensor with a gradient, as cross attention",
                where=f"{WHERE}: {DIVIDES}",
                expected="one, whose positions are gathered",
                remedy=f"leave {DIVIDES} out of the plan",
            )
        return tuple(values[at] for at in range(len(arguments))), {name: values[name] for name in named}


def own_of_sum(parts: Sequence[torch.Tensor], link: Link) -> torch.Tensor:
    """Return the own positions of the sum over all slices, given the part of each hosted one.

    Raises `TaskError` if there are no equally many positions for each slice.
    """
    slices, length = len(parts) * link.ranks, parts[0].shape[-2]
    if length % slices:
        raise TaskError(
            f"{length} positions cannot be divided between {slices} slices",
            where=f"{WHERE}: {DIVIDES}",
            expected=f"rows of a length that {slices} divides",
            remedy=f"pad them in Task.collate, or write them with length {length // slices * slices}",
        )
    total: torch.Tensor = _OwnOfSum.apply(link, *parts)
    return total


def cut(given: torch.Tensor, count: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Return the part of each of `count` hosted slices along a dimension, each in memory of its own."""
    parts: tuple[torch.Tensor, ...] = _Cut.apply(given, count, dim)
    return parts


def divided(whole: torch.Tensor, count: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Return what `cut` does, without a gradient.

    Each part is in memory of its own, however many are hosted, because the bits of a matrix product can depend on how
    its operands lie in memory.
    """
    return tuple(part.contiguous() for part in whole.chunk(count, dim))


class _Cut(torch.autograd.Function):
    """See `cut`."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, count: int, dim: int) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        return tuple(part.view_as(part) if part is given else part for part in divided(given, count, dim))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.cat(gradients, ctx.dim), None, None


class _Join(torch.autograd.Function):
    """The positions of all hosted slices."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parts)
        return torch.cat(parts, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return divided(gradient, ctx.count, -2)


class _Copies(torch.autograd.Function):
    """See `copies`."""

    @staticmethod
    def forward(ctx: Any, link: Link, count: int, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.link, ctx.count = link, count
        return tuple(weight.view_as(weight) for weight in weights for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        first = gradients[:: ctx.count]
        flat = [torch.cat([one.reshape(-1) for one in gradients[n :: ctx.count]]) for n in range(ctx.count)]
        parts = ctx.link.sum(flat).split([one.numel() for one in first])
        return None, None, *(part.view_as(one) for part, one in zip(parts, first, strict=True))


class _Gather(torch.autograd.Function):
    """See `gathered`."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, count: int, link: Link) -> tuple[torch.Tensor, ...]:
        ctx.link = link
        whole = link.whole(given)
        return tuple(whole.view_as(whole) for _ in range(count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.link.own_of_sum(gradients), None, None


class _OwnOfSum(torch.autograd.Function):
    """See `own_of_sum`."""

    @staticmethod
    def forward(ctx: Any, link: Link, *parts: torch.Tensor) -> torch.Tensor:
        ctx.link, ctx.count = link, len(parts)
        total: torch.Tensor = link.own_of_sum(parts)
        return total.view_as(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *([ctx.link.whole(gradient)] * ctx.count)
