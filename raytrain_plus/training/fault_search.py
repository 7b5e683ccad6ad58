"""Find the shard and the parameter whose gradient is not finite while a step is recomputed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from raytrain_plus.torch_compat import float64_norms
from raytrain_plus.training.verdict import Fault


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


class Norms:
    """The float64 norms of some tensors, kept on the tensors' devices until `squares` copies them to the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Measure tensors of any device and dtype, also empty and complex ones; they may change afterwards."""
        self._count = len(tensors)
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                # A kernel over many tensors needs one device and one dtype.
                alike[real.device, real.dtype].append((number, real))
        of_devices: dict[torch.device, list[tuple[list[int], torch.Tensor]]] = defaultdict(list)
        for (device, _), group in alike.items():
            norms = float64_norms([tensor for _, tensor in group])
            of_devices[device].append(([number for number, _ in group], torch.stack(norms)))
        self._of_devices = [
            ([number for numbers, _ in found for number in numbers], torch.cat([norms for _, norms in found]))
            for found in of_devices.values()
        ]

    def squares(self) -> list[float]:
        """Return the sum of squares of each tensor, in order, with one transfer per device."""
        found = [0.0] * self._count
        for numbers, norms in self._of_devices:
            for number, norm in zip(numbers, norms.tolist(), strict=True):
                # `**` would raise OverflowError; this gives infinity.
                found[number] = norm * norm
        return found
