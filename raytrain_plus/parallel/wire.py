"""How a bucket of gradients travels: what is summed over the world, and how the sums become gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

from raytrain_plus.collective.exact import ExactSum
from raytrain_plus.collective.world import Work, World
from raytrain_plus.parallel.weighting import Weight, Weighting, multiply
from raytrain_plus.torch_compat import write_count

Named = Sequence[tuple[str, nn.Parameter]]
Rider = Callable[[torch.dtype], int]
"""Returns how many numbers of a floating-point type are summed with a bucket."""


class Wire(Protocol):
    """The gradients of some parameters, to which every shard's backward passes add, and their sums over the world."""

    views: Sequence[torch.Tensor]
    """The gradient of each parameter."""
    rider: torch.Tensor
    """Numbers summed with the gradients: written before the last backward pass, read after the sum; or none."""
    given: torch.Tensor
    """For each parameter, a number that is not zero if it has a gradient.

    Written before `submit`, for this worker's shards; after the sum it stands for all shards.
    """
    exact: ExactSum | None
    """The sum that must settle before its means are taken; None if any sum will do."""
    flushed: torch.Tensor | None
    """The number of values, other than zero, that were sent as zero; None if all travel as they are."""

    def begin(self, scales: Mapping[str, int]) -> None:
        """Clear everything. `scales`: the exponents of the quanta of an exact sum."""

    def writes(self) -> int:
        """Return how often gradients have been written in place."""

    def weigh(self, weight: Weight) -> None:
        """Have what is added to the gradients from now on count by a weight; without one it counts as it is."""

    def end_shard(self) -> None:
        """End a shard whose gradients are complete, before the next one begins."""

    def submit(self, world: World, name: str) -> Sequence[Work]:
        """Start to sum the gradients of all shards, the last of which is complete, over a world.

        `name` distinguishes this sum from others that are under way.
        """

    def take_means(self, weight: float) -> None:
        """Turn the sums into gradients: divide them by the weight of all shards."""

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""


class Plain(Wire):
    """The gradients themselves are summed."""

    exact: ExactSum | None = None
    flushed: torch.Tensor | None = None

    def __init__(self, named: Named, rider: Rider) -> None:
        """Allocate the bucket, and make its views the gradients of the parameters."""
        self._bucket, self.views = allocate_bucket(named, lambda dtype: len(named) + rider(dtype))
        own = sum(map(real_numbers, self.views))
        self._gradients = self._bucket[:own]
        self.given = self._bucket[own : own + len(named)]
        self.rider = self._bucket[own + len(named) :]
        self._weighting = Weighting()

    @override
    def begin(self, scales: Mapping[str, int]) -> None:
        self._bucket.zero_()
        self._weighting.begin()

    @override
    def writes(self) -> int:
        return write_count(self._bucket)

    @override
    def weigh(self, weight: Weight) -> None:
        self._weighting.next(self._gradients, weight)

    def end_shard(self) -> None:
        """See `Wire`: every shard adds to the bucket."""

    @override
    def submit(self, world: World, name: str) -> Sequence[Work]:
        if world.size > 1:
            multiply(self._gradients, self._weighting.take())
        return [world.reduce(self._bucket, name)]

    @override
    def take_means(self, weight: float) -> None:
        # A worker alone multiplies once.
        self._gradients.mul_(self._weighting.take() / weight)

    @override
    def scale(self, factor: float) -> None:
        self._gradients.mul_(factor)


class Exact(Wire):
    """The sums are the same bits in any order: a float64 vector beside the bucket gets each shard's rounded gradients.

    See `collective.exact`.
    """

    flushed: torch.Tensor | None = None

    def __init__(self, named: Named, rider: Rider, shards: int) -> None:
        """Allocate bucket and vector, and make the bucket's views the gradients; `shards`: the job's number of them."""
        # The numbers of the bucket have the order of the sums.
        self._bucket, self.views = allocate_bucket(named, nothing)
        sizes = {name: parameter.numel() for name, parameter in named}
        self.exact = ExactSum(sizes, shards, self._bucket.device, len(named) + rider(torch.float64))
        self.given, self.rider = self.exact.rider[: len(named)], self.exact.rider[len(named) :]
        self._weighting = Weighting()

    @override
    def begin(self, scales: Mapping[str, int]) -> None:
        self._bucket.zero_()
        self._weighting.begin()
        self.exact.begin(scales)

    @override
    def writes(self) -> int:
        return write_count(self._bucket)

    @override
    def weigh(self, weight: Weight) -> None:
        self._weighting.next(self._bucket, weight)

    @override
    def end_shard(self) -> None:
        self._add()
        self._bucket.zero_()

    @override
    def submit(self, world: World, name: str) -> Sequence[Work]:
        self._add()
        return [world.reduce(self.exact.wire, name)]

    def _add(self) -> None:
        """Add the gradients of a shard to the sums."""
        multiply(self._bucket, self._weighting.take())
        self.exact.add(self.views)

    @override
    def take_means(self, weight: float) -> None:
        # A sum can exceed the range of the gradient's dtype although its mean does not; only this copy rounds to that
        # dtype.
        self._bucket.copy_(self.exact.total.div_(weight))

    @override
    def scale(self, factor: float) -> None:
        self._bucket.mul_(factor)


def nothing(_: torch.dtype) -> int:
    """Have nothing summed with a bucket."""
    return 0


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: its own, unless `Tensor.grad_dtype` says otherwise."""
    dtype: torch.dtype | None = parameter.grad_dtype
    return parameter.dtype if dtype is None else dtype


def real_numbers(tensor: torch.Tensor) -> int:
    """Return the number of real numbers in a tensor: two for each complex number."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def allocate_bucket(named: Named, rider: Rider) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a flat bucket that ends with a rider, and its views, which become the gradients of the parameters.

    The bucket holds real numbers: two for each number of a complex parameter.
    """
    like = named[0][1] if named else torch.zeros(0)
    dtype = gradient_dtype(like).to_real()
    sizes = [real_numbers(parameter) for _, parameter in named]
    flat = torch.zeros(sum(sizes) + rider(dtype), dtype=dtype, device=like.device)
    views: list[torch.Tensor] = []
    for (_, parameter), part in zip(named, flat.split([*sizes, len(flat) - sum(sizes)]), strict=False):
        if parameter.is_complex():
            part = torch.view_as_complex(part.view(-1, 2))
        parameter.grad = view = part.view_as(parameter)
        views.append(view)
    return flat, views


MakeWire = Callable[[Named, Rider], Wire]
"""Allocates what the gradients of some parameters need to travel."""
