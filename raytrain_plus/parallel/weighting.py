"""Weight gradients in their bucket, not in the loss, so that hooks and custom backward passes see those of the mean.

What a microbatch adds to a bucket are the gradients of its mean loss. Before one of another weight is added, what is
there is multiplied by the last weight over the next one; at the end, everything is multiplied by the last weight. So
microbatches of equal weights cost one multiplication in a step. Weights on a device cannot be compared without a wait,
so each costs one.
"""

from __future__ import annotations

import torch

Weight = float | torch.Tensor
"""A number of the host, or one in float64 on a device, without dimensions, which nobody waits for."""


class Weighting:
    """The weight by which the gradients in a bucket are still to be multiplied."""

    def __init__(self) -> None:
        """Begin with an empty bucket."""
        self._weight: Weight | None = None

    def begin(self) -> None:
        """Begin again: the bucket is empty."""
        self._weight = None

    def next(self, gradients: torch.Tensor, weight: Weight) -> None:
        """Prepare the gradients in a bucket for others of this weight; those of weight 0 must be zeros."""
        before = self._weight
        if isinstance(weight, torch.Tensor) or isinstance(before, torch.Tensor):
            # A copy from the host would make it wait for its device.
            given = torch.zeros((), dtype=torch.float64, device=gradients.device).add_(weight)
            self._weight = torch.where(given == 0, 1.0 if before is None else before, given)
            if before is not None:
                multiply(gradients, before / self._weight)
        elif weight and before != weight:
            self._weight = weight
            if before is not None:
                multiply(gradients, before / weight)

    def take(self) -> Weight:
        """Return by what the caller must multiply the gradients now; from then on nothing is left to multiply."""
        weight, self._weight = self._weight, None
        return 1.0 if weight is None else weight


def multiply(gradients: torch.Tensor, weight: Weight) -> None:
    """Multiply gradients, unless that changes nothing."""
    if isinstance(weight, torch.Tensor) and gradients.dtype.itemsize == 2:
        # A GPU would round the weight to 16 bits first.
        gradients.copy_(gradients.float().mul_(weight))
    elif isinstance(weight, torch.Tensor) or weight != 1.0:
        gradients.mul_(weight)
