"""Gradients that travel in two bytes a number.

Libraries that sum numbers of 16 bits round after every addition, and Horovod does not know bfloat16. So the members
exchange and gather bytes, and add in float32 in between:

    exchange    each member gets its part of every member's bucket, in 16 bits
    sum         over the members, in float32, in the order of ranks; rounded to 16 bits
    gather      each member gets every part; all have the same bits, also the member that made them

That is what a ring all-reduce sends, at half the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from raytrain_plus.collective.exact import ExactSum
from raytrain_plus.collective.world import Work, World
from raytrain_plus.parallel.wire import Named, Rider, allocate_bucket, nothing


class Half:
    """A bucket in float32 or float64 of which a copy travels; see `wire.Wire`."""

    exact: ExactSum | None = None

    def __init__(self, named: Named, rider: Rider, dtype: torch.dtype, weight: float) -> None:
        """Allocate the bucket, and make its views the gradients of the parameters.

        `dtype`: that of the numbers on their way, float16 or bfloat16. `weight`: about the weight of a step, in rows.
        Gradients are sums over rows until the means are taken: what travels is divided by a power of two near
        `weight`, because float16 ends at 65504.
        """
        self._bucket, self.views = allocate_bucket(named, nothing)
        self.rider = torch.zeros(rider(torch.float32), device=self._bucket.device)
        self._dtype = dtype
        self._unit = 2.0 ** math.ceil(math.log2(weight)) if dtype == torch.float16 else 1.0

    def begin(self, scales: Mapping[str, int]) -> None:
        """See `Wire`."""
        self._bucket.zero_()
        self.rider.zero_()

    def end_shard(self) -> None:
        """See `Wire`: they are in it."""

    def submit(self, world: World, name: str) -> list[Work]:
        """See `Wire`."""
        works = [world.reduce(self.rider, f"{name}.rider")] if len(self.rider) else []
        if len(self._bucket):
            works.append(_HalfSum(world, self._bucket, self._dtype, self._unit, name))
        return works

    def take_means(self, weight: float) -> None:
        """See `Wire`."""
        self._bucket.mul_(1.0 / weight)

    def scale(self, factor: float) -> None:
        """See `Wire`."""
        self._bucket.mul_(factor)


class _HalfSum:
    """The sum of a bucket over a world, under way: a `Work` of two collectives, one after the other.

    The second one begins in `done`. Worlds that match operations by their order need every member to wait in one order,
    and nothing to be submitted meanwhile, as the step does.
    """

    def __init__(self, world: World, bucket: torch.Tensor, dtype: torch.dtype, unit: float, name: str) -> None:
        self._world = world
        self._bucket = bucket
        self._dtype = dtype
        self._unit = unit
        self._name = name
        length = -(-len(bucket) // world.size)
        self._travelling = torch.zeros(world.size, length, dtype=dtype, device=bucket.device)
        self._travelling.view(-1)[: len(bucket)] = bucket / unit
        self._received = torch.empty_like(self._travelling)
        self._exchanged = world.exchange(self._travelling, self._received, f"{name}.exchange")
        self._gathered: Work | None = None

    def done(self) -> bool:
        """See `Work`."""
        if self._gathered is None:
            if not self._exchanged.done():
                return False
            self._exchanged.finish()
            part = self._received.float().sum(0).to(self._dtype)
            self._gathered = self._world.gather(part, self._travelling, f"{self._name}.gather")
        return self._gathered.done()

    def finish(self) -> None:
        """See `Work`."""
        assert self._gathered is not None, "it is done"
        self._gathered.finish()
        self._bucket.copy_(self._travelling.view(-1)[: len(self._bucket)]).mul_(self._unit)
