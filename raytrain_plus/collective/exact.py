"""Exact sums: every shard's values are rounded to one grid before they are added.

Floating-point sums depend on their order, and a ring's order depends on its size. Sums of integer multiples of one
quantum do not, as long as they stay below 2^53 quanta: float64 represents each of them exactly. A tensor's quantum q is
a power of two. A value x is rounded to it by (x + C) - C with C = 1.5 * 2^52 * q, in float64, in which the numbers
around C are q apart.

For each tensor, the sum over shards of the largest magnitude in quanta is reduced along with the values. It bounds
every partial sum, so it shows whether the sum was exact, and it determines the next step's quantum. It is a sum of
whole numbers, so it is the same on every worker. A sum whose quantum was too small or far too large is not settled: it
is discarded, all workers agree on the largest magnitude, and the shards add again.

The rounding is that of Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013, with the grid known
beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from raytrain_plus.device_copies import Numbers, from_host
from raytrain_plus.torch_compat import add_each, largest_each, sum_each

LIMIT_BITS = 51
"""A tensor's largest magnitudes, in quanta and summed over shards, stay below 2 to this power."""
USUAL_BITS = 45
"""Bits of that sum in a usual step: a quantum is 2^-44 of it or finer, and it may grow 64 times in a step."""
LEAST_BITS = 31
"""Minimum bits for each of several similar shards: with fewer, the grid is too coarse for the values."""
_SMALLEST, _LARGEST = -1022, 969
"""Exponents of the quanta to which float64 can round, also if it flushes the smallest numbers to zero."""
_HUGE = 1000
"""Magnitudes of 2 to this power or more count as infinite: their sums could not be represented."""
_ZERO, _NOT_FINITE = -(1 << 20), 1 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of the sums of largest magnitudes, the same on every worker."""

    settled: bool
    """The sums are exact and fine enough."""
    scales: Mapping[str, int]
    """The exponents of the quanta for the next step. Tensors that were zero everywhere keep theirs."""


class ExactSum:
    """The sums of some tensors over shards, as one flat vector to be reduced over a world."""

    def __init__(self, sizes: Mapping[str, int], shards: int, device: torch.device, riding: int = 0) -> None:
        """Allocate the sums. `sizes`: the number of values of each tensor, by name.

        `riding`: how many more numbers are summed with them, without rounding.
        """
        self.names = tuple(sizes)
        own, count = sum(sizes.values()), len(sizes)
        self.wire = torch.zeros(own + count + riding, dtype=torch.float64, device=device)
        """The vector to be summed over the world in place."""
        self.total = self.wire[:own]
        """The sums of all tensors, flat."""
        self.sums: Sequence[torch.Tensor] = self.total.split(list(sizes.values()))
        """Each tensor's sum, flat."""
        self.rider = self.wire[own + count :]
        self._magnitudes = self.wire[own : own + count]
        self._rounded = torch.zeros(0 if self.wire.is_cuda else max(sizes.values(), default=0), dtype=torch.float64)
        """Memory for one tensor, which stays in the cache of a CPU."""
        self._largest = torch.zeros(count, dtype=torch.float64, device=device)
        spread = math.ceil(math.log2(shards))
        # All shards together stay below the limit even if each is as large as the largest.
        self._measured_bits = min(USUAL_BITS, LIMIT_BITS - 1 - spread)
        self._least_bits = min(LEAST_BITS + spread, self._measured_bits)
        self._exponents: list[int | None] = []
        self._quanta = self._largest
        self._summed: Numbers | None = None

    def begin(self, scales: Mapping[str, int]) -> None:
        """Clear the sums and set the exponents of the quanta.

        A tensor without an exponent is measured and not settled.
        """
        self.wire.zero_()
        self._largest.zero_()
        self._exponents = [scales.get(name) for name in self.names]
        # Without an exponent, only whether a value differs from zero matters.
        quanta = [math.ldexp(1.0, exponent or 0) for exponent in self._exponents]
        self._quanta = from_host(torch.tensor(quanta, dtype=torch.float64), self.wire.device)
        self._summed = None

    def add(self, values: Sequence[torch.Tensor]) -> None:
        """Add one shard's values of every tensor."""
        if not values:
            return
        largest = _largest(values)
        torch.maximum(self._largest, largest, out=self._largest)
        # Too large, infinite or NaN: the sum then shows it.
        self._magnitudes.add_((largest / self._quanta).ceil_().maximum(torch.sign(largest)))
        if self.wire.is_cuda:
            self.add_rounded(values)
            return
        for value, total, exponent in zip(values, self.sums, self._exponents, strict=True):
            if exponent is None:
                continue
            middle = _middle(exponent)
            rounded = self._rounded[: value.numel()]
            rounded.copy_(value.reshape(-1))
            rounded.add_(middle).sub_(middle)
            total.add_(rounded)

    def add_rounded(self, values: Sequence[torch.Tensor]) -> None:
        """Add one shard's rounded values, by few kernels: on a GPU each kernel costs more than most tensors."""
        known = [
            (value.reshape(-1), total, _middle(exponent))
            for value, total, exponent in zip(values, self.sums, self._exponents, strict=True)
            if exponent is not None
        ]
        if not known:
            return
        flat, totals, middles = (list(one) for one in zip(*known, strict=True))
        joined = torch.cat(flat).to(torch.float64)
        rounded = list(joined.split([len(one) for one in flat]))
        add_each(rounded, middles)
        add_each(rounded, [-middle for middle in middles])
        sum_each(totals, rounded)

    def keep_readings(self) -> None:
        """Give up the memory of the sums, after the sum over the world; what they showed can still be read."""
        self._magnitudes = self._magnitudes.clone()
        self.wire = self.total = self.rider = self._rounded = self.wire.new_zeros(0)
        self.sums = ()
        self._summed = None

    @property
    def magnitudes(self) -> Numbers:
        """The largest magnitudes in quanta, after the sum over the world: all that `read` and `overflowed` need."""
        if self._summed is None:
            self._summed = Numbers(self._magnitudes)
        return self._summed

    def read(self) -> Reading:
        """Return the result after the sum over the world."""
        settled, scales = True, {}
        for name, exponent, magnitude in zip(self.names, self._exponents, self.magnitudes.values(), strict=True):
            if magnitude == 0:
                if exponent is not None:
                    scales[name] = exponent
                continue
            bits = math.frexp(magnitude)[1]
            fits = magnitude < 2.0**LIMIT_BITS
            if exponent is None or not fits or (bits < self._least_bits and exponent > _SMALLEST):
                settled = False
            else:
                scales[name] = _possible(exponent + bits - USUAL_BITS)
        return Reading(settled, scales)

    def overflowed(self) -> list[str]:
        """Return the names of the tensors that are not finite in some shard, after the sum over the world."""
        return [
            name for name, value in zip(self.names, self.magnitudes.values(), strict=True) if not math.isfinite(value)
        ]

    def largest(self) -> npt.NDArray[np.int64]:
        """Return, for each tensor, the power of two that bounds the magnitudes added here.

        Its maximum over the world is the input of `scales_from`.
        """
        largest = self._largest.cpu().numpy()
        finite = np.nan_to_num(largest, nan=0.0, posinf=0.0)
        exponents: npt.NDArray[np.int64] = np.frexp(finite)[1].astype(np.int64)
        exponents[largest == 0] = _ZERO
        exponents[~np.isfinite(largest) | (exponents > _HUGE)] = _NOT_FINITE
        return exponents

    def scales_from(self, largest: npt.NDArray[np.int64]) -> dict[str, int]:
        """Return the exponents with which the sum settles; tensors that are zero everywhere or not finite have none."""
        known = zip(self.names, largest.tolist(), strict=True)
        return {name: _possible(top - self._measured_bits) for name, top in known if top not in (_ZERO, _NOT_FINITE)}

    def not_finite(self, largest: npt.NDArray[np.int64]) -> list[str]:
        """Return the names of the tensors that are not finite in some shard."""
        return [name for name, top in zip(self.names, largest.tolist(), strict=True) if top == _NOT_FINITE]


def _middle(exponent: int) -> float:
    """Return the number around which float64's numbers are 2 to the power of `exponent` apart."""
    return math.ldexp(1.5, 52 + exponent)


def _largest(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude of each tensor in float64; NaN if a value is NaN."""
    zero = values[0].new_zeros(())
    norms = iter(largest_each([value for value in values if value.numel()]))
    return torch.stack([next(norms) if value.numel() else zero for value in values]).to(torch.float64)


def _possible(exponent: int) -> int:
    return min(max(exponent, _SMALLEST), _LARGEST)
