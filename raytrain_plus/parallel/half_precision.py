"""Gradients that travel in two bytes a number.

Libraries that sum numbers of 16 bits round after every addition, and Horovod does not know bfloat16. So the members
exchange and gather bytes, and add in float32 (float64 if the gradients are) in between:

    exchange    each member gets its part of every member's bucket, in 16 bits
    sum         over the members, in the order of ranks; rounded to 16 bits
    gather      each member gets every part; all have the same bits, also the member that made them

That is what a ring all-reduce sends, at half the bytes. Each part brings its scale along, the power of two that makes
its largest value nearly 2^15: float16 ends at 65504, and a step's weights and the loss can have any magnitude. The
scale depends on nothing but the values, so a member that has just joined sends as the others do.

    part    scale | values sent as zero | a byte for each parameter: does it have a gradient? | padding | values
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override

from raytrain_plus.collective.exact import ExactSum
from raytrain_plus.collective.world import Work, World
from raytrain_plus.errors import TaskError
from raytrain_plus.parallel.weighting import Weight, Weighting, multiply
from raytrain_plus.parallel.wire import Named, Plain, Rider, Wire, allocate_bucket, gradient_dtype, nothing
from raytrain_plus.torch_compat import write_count

HALVES = (torch.float16, torch.bfloat16)
Summed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
_TOP = 2.0**15
"""The largest value of a part in its scale lies below this and is at least half of it."""
_SMALLEST = {torch.float32: 2.0**-110, torch.float64: 2.0**-900}
"""The smallest scale, by the dtype of the addition; its inverse must be finite."""
_CARRIED = (*HALVES, torch.float32, torch.float64, torch.complex64)
"""The dtypes of gradients that can be summed over workers, of parameters that a checkpoint can hold."""


def ring_wire(named: Named, rider: Rider, compressed: torch.dtype | None = None) -> Wire:
    """Return the wire of a bucket if sums need not be exact; `compressed`: the 16 bits to which numbers are rounded.

    Gradients that have 16 bits travel as they are.
    """
    dtype = gradient_dtype(named[0][1]) if named else torch.float32
    if dtype in HALVES:
        return Half(named, rider, dtype)
    if compressed is not None:
        return Half(named, rider, compressed)
    return Plain(named, rider)


def check_carried(named: Named) -> None:
    """Raise `TaskError` for a parameter whose gradients cannot be summed over workers."""
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype not in _CARRIED:
            raise TaskError(
                f"the parameter '{name}' is {str(parameter.dtype).removeprefix('torch.')}, and gradients of this dtype "
                "cannot be summed over workers",
                where="model()",
                expected=", ".join(str(dtype).removeprefix("torch.") for dtype in _CARRIED),
                remedy="keep the parameter in float32, or freeze it with requires_grad_(False)",
            )


class Half(Wire):
    """A bucket that is sent as a 16-bit copy; see `wire.Wire`."""

    exact: ExactSum | None = None

    def __init__(self, named: Named, rider: Rider, dtype: torch.dtype) -> None:
        """Allocate the bucket, and make its views the gradients of the parameters.

        `dtype`: the dtype sent, float16 or bfloat16.
        """
        self._bucket, self.views = allocate_bucket(named, nothing)
        device = self._bucket.device
        self.rider = torch.zeros(rider(torch.float32), device=device)
        self.given = torch.zeros(len(named), device=device)
        self.flushed = torch.zeros((), dtype=torch.int64, device=device)
        self._dtype = dtype
        self._total: torch.Tensor | None = None
        """The sums in float32 if the bucket has 16 bits, which hold the means but perhaps not the sums."""
        self._weighting = Weighting()

    @override
    def begin(self, scales: Mapping[str, int]) -> None:
        for tensor in (self._bucket, self.rider, self.given, self.flushed):
            tensor.zero_()
        self._weighting.begin()

    @override
    def writes(self) -> int:
        return write_count(self._bucket)

    @override
    def weigh(self, weight: Weight) -> None:
        self._weighting.next(self._bucket, weight)

    def end_shard(self) -> None:
        """See `Wire`: they are in it."""

    @override
    def submit(self, world: World, name: str) -> list[Work]:
        works = [world.reduce(self.rider, f"{name}.rider")] if len(self.rider) else []
        if len(self.given) and not (world.size == 1 and self._bucket.dtype in HALVES):
            weight = self._weighting.take()
            works.append(_Exchange(world, self._bucket, weight, self.given, self._dtype, name, self._summed))
        return works

    def _summed(self, values: torch.Tensor, given: torch.Tensor, flushed: torch.Tensor) -> None:
        self.given.copy_(given)
        self.flushed.copy_(flushed)
        if self._bucket.dtype in HALVES:
            self._total = values
        else:
            self._bucket.copy_(values)

    @override
    def take_means(self, weight: float) -> None:
        total, self._total = self._total, None
        if total is None:
            multiply(self._bucket, self._weighting.take() / weight)
        else:
            self._bucket.copy_(total.mul_(1.0 / weight))

    @override
    def scale(self, factor: float) -> None:
        self._bucket.mul_(factor)


class _Exchange(Work):
    """The sum of a bucket over a world, under way: the first of two collectives; see `world.Work`."""

    def __init__(
        self,
        world: World,
        bucket: torch.Tensor,
        weight: Weight,
        given: torch.Tensor,
        dtype: torch.dtype,
        name: str,
        summed: Summed,
    ) -> None:
        """Begin; `weight`: by what the gradients are multiplied.

        `summed` is called at the end with the sums, which parameters have a gradient, and how many values were sent as
        zero.
        """
        self._world = world
        self._count = len(bucket)
        self._name = name
        self._summed = summed
        # Gradients of 16 bits are added in 32.
        self._added_in = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        length = -(-len(bucket) // world.size)
        values = torch.zeros(world.size, length, dtype=self._added_in, device=bucket.device)
        values.view(-1)[: len(bucket)] = bucket
        multiply(values, weight)
        self._sent, self._received, self._sums = (
            _Parts.allocated(count, len(given), length, dtype, bucket.device) for count in (world.size, world.size, 1)
        )
        self._sent.put(values, given.ne(0), 0)
        self._exchanged = world.exchange(self._sent.bytes, self._received.bytes, f"{name}.exchange")

    @override
    def ended(self, within_s: float) -> bool:
        return self._exchanged.ended(within_s)

    def finish(self) -> Work:
        """Add what has arrived, and start to gather the sums."""
        self._exchanged.finish()
        total = self._received.values(self._added_in).sum(0, keepdim=True)
        self._sums.put(total, self._received.given.amax(0), self._received.flushed.sum())
        # The bytes sent have arrived, so their memory can be reused.
        every, mine = self._sent, self._sums.bytes
        del self._received, self._sent, self._sums
        gathering = self._world.gather(mine, every.bytes, f"{self._name}.gather")
        return _Gather(gathering, every, self._count, self._added_in, self._summed)


class _Gather(Work):
    """The second collective of a sum; see `world.Work`."""

    def __init__(self, work: Work, every: _Parts, count: int, added_in: torch.dtype, summed: Summed) -> None:
        """Follow the gathering of `every` part; see `_Exchange` for the rest."""
        self._work = work
        self._every = every
        self._count = count
        self._added_in = added_in
        self._summed = summed

    @override
    def ended(self, within_s: float) -> bool:
        return self._work.ended(within_s)

    def finish(self) -> None:
        """Hand over the sums."""
        self._work.finish()
        values = self._every.values(self._added_in).view(-1)[: self._count]
        self._summed(values, self._every.given.amax(0), self._every.flushed.sum())


@dataclass(frozen=True, slots=True)
class _Parts:
    """Some parts of a bucket as bytes, one a row, and views of their fields; see the module docstring."""

    bytes: torch.Tensor
    scale: torch.Tensor
    flushed: torch.Tensor
    given: torch.Tensor
    halves: torch.Tensor

    @classmethod
    def allocated(cls, count: int, parameters: int, length: int, dtype: torch.dtype, device: torch.device) -> _Parts:
        """Return `count` parts of `length` values, with a byte for each of `parameters`."""
        # A view as numbers of eight bytes needs rows that are multiples of eight long.
        start = -(-(16 + parameters) // 2) * 2
        size = -(-(start + 2 * length) // 8) * 8
        rows = torch.zeros(count, size, dtype=torch.uint8, device=device)
        return cls(
            bytes=rows,
            scale=rows[:, :8].view(torch.float64),
            flushed=rows[:, 8:16].view(torch.int64),
            given=rows[:, 16 : 16 + parameters],
            halves=rows[:, start : start + 2 * length].view(dtype),
        )

    def put(self, values: torch.Tensor, given: torch.Tensor, flushed: torch.Tensor | int) -> None:
        """Write values, one row a part; `flushed`: how many of their summands were sent as zero."""
        scale = _scale(values)
        self.scale.copy_(scale)
        self.halves.copy_(values / scale)
        self.given.copy_(given)
        lost = (self.halves.eq(0) & values.ne(0)).sum(1, keepdim=True)
        self.flushed.copy_(lost + flushed)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values, one row a part."""
        return self.halves.to(dtype).mul_(self.scale.to(dtype))


def _scale(values: torch.Tensor) -> torch.Tensor:
    """Return each row's scale as a column: a power of two; 1 if all is zero, or something is not finite."""
    if not values.shape[1]:
        return values.new_ones(len(values), 1)
    largest = values.abs().amax(1, keepdim=True)
    mantissa, _ = torch.frexp(largest)
    scale = (largest / _TOP / mantissa).clamp_(min=_SMALLEST[values.dtype])
    return torch.where(largest.isfinite() & largest.ne(0), scale, torch.ones_like(scale))
