"""Find the shard and the parameter whose gradient is not finite, while a step is computed again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from raytrain_plus.training.verdict import Fault


class FaultSearch:
    """Checks each shard's gradients when its last backward pass is made, before they are summed with others'."""

    def __init__(self) -> None:
        self._found: dict[int, Fault] = {}

    @property
    def found(self) -> list[Fault]:
        """The first fault of each chunk that this worker holds."""
        return list(self._found.values())

    def shard_ended(self, shard: int, chunk: int, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Check the gradients of a chunk; those of earlier shards may be in them, so only the first fault counts."""
        if chunk in self._found:
            return
        trained = [(name, value.grad) for name, value in parameters if value.grad is not None]
        squares = square_norms([gradient for _, gradient in trained])
        bad = [name for (name, _), square in zip(trained, squares, strict=True) if not math.isfinite(square)]
        if bad:
            # Backward goes from the last parameter to the first: the last one was the first to be wrong.
            self._found[chunk] = Fault(shard, chunk, bad[-1])


def square_norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the sum of squares of each tensor, in float64; one transfer from the device."""
    if not tensors:
        return []
    norms: list[float] = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).tolist()
    return [norm**2 for norm in norms]
