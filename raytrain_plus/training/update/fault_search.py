"""Find the shard and the parameter whose gradient is not finite while a step is recomputed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from raytrain_plus.training.exchange.verdict import Fault
from raytrain_plus.training.weights.norms import Norms


@dataclass(frozen=True, slots=True)
class _Checked:
    """The gradients of one chunk after a shard's last backward pass; the norms are still on their device."""

    shard: int
    chunk: int
    names: tuple[str, ...]
    norms: Norms


class FaultSearch:
    """Check each shard's gradients after its last backward pass, before they are summed with those of other shards.

    Nothing waits for the device until `found` is called.
    """

    def __init__(self) -> None:
        self._checked: list[_Checked] = []

    def shard_ended(self, shard: int, chunk: int, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Measure the gradients of a chunk.

        They can include the gradients of earlier shards, so only the first fault counts.
        """
        trained = [(name, value.grad) for name, value in parameters if value.grad is not None]
        if trained:
            names, gradients = zip(*trained, strict=True)
            self._checked.append(_Checked(shard, chunk, names, Norms(gradients)))

    def found(self) -> list[Fault]:
        """Return the first fault of each chunk that this worker holds."""
        faults: dict[int, Fault] = {}
        for one in self._checked:
            if one.chunk in faults:
                continue
            bad = [
                name for name, square in zip(one.names, one.norms.squares(), strict=True) if not math.isfinite(square)
            ]
            if bad:
                # Backward runs from the last parameter to the first: the last faulty parameter is the origin.
                faults[one.chunk] = Fault(one.shard, one.chunk, bad[-1])
        return list(faults.values())
