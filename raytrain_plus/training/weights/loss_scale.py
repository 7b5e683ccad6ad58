"""The scale of the loss with `precision: fp16`: gradients that are too small for float16 would become zero. Pure.

The mean loss of each microbatch is multiplied by the scale, and the means of gradients are divided by it. The scale is
a power of two, so neither changes a digit. Gradients that are not finite have overflowed: the step is
computed again with half the scale. Its rows are never lost, as they are where such steps are skipped. After many steps
without an overflow, the scale is doubled.

The constants are those of `torch.amp.GradScaler`; see Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from raytrain_plus.state.holding import LOSS_SCALE, LOSS_SCALE_STEPS

FIRST = 16
"""Exponent of a run's first scale."""
LARGEST = 24
"""Exponent of the largest scale."""
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale is doubled."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """A scale, 2 to the power of `exponent`, and the number of steps that it has lasted."""

    exponent: int
    steps: int = 0

    @property
    def factor(self) -> float:
        """The scale itself."""
        return math.ldexp(1.0, self.exponent)

    def halved(self, weight: float) -> LossScale | None:
        """Return half the scale, or None if the mean loss of a microbatch is not scaled any more.

        `weight`: by what the mean loss is multiplied, too; 1 but in runs of older versions.

        >>> LossScale(1).halved(1.0), LossScale(0).halved(1.0), LossScale(-9).halved(1024.0)
        (LossScale(exponent=0, steps=0), None, LossScale(exponent=-10, steps=0))
        """
        return LossScale(self.exponent - 1) if self.factor * weight > 1.0 else None

    def after_step(self) -> LossScale:
        """Return the scale of the next step, after one without an overflow.

        >>> LossScale(5, 1998).after_step(), LossScale(5, 1999).after_step()
        (LossScale(exponent=5, steps=1999), LossScale(exponent=6, steps=0))
        """
        if self.steps + 1 < GROWTH_STEPS:
            return LossScale(self.exponent, self.steps + 1)
        return LossScale(min(self.exponent + 1, LARGEST))


def put(scale: LossScale, counts: MutableMapping[str, int]) -> None:
    """Write a scale into the counts of a state."""
    counts[LOSS_SCALE], counts[LOSS_SCALE_STEPS] = scale.exponent, scale.steps


def found_in(counts: Mapping[str, int]) -> LossScale | None:
    """Return the scale that `put` wrote; None if the loss is not scaled."""
    return LossScale(counts[LOSS_SCALE], counts[LOSS_SCALE_STEPS]) if LOSS_SCALE in counts else None
