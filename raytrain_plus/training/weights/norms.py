"""Measure the norms of many tensors at once, with few kernels and one transfer per device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from raytrain_plus.device_copies import Numbers, read_together
from raytrain_plus.torch_compat import float64_norms


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
            ([number for numbers, _ in found for number in numbers], Numbers(torch.cat([norms for _, norms in found])))
            for found in of_devices.values()
        ]

    @property
    def unread(self) -> list[Numbers]:
        """What `squares` reads."""
        return [norms for _, norms in self._of_devices]

    def squares(self) -> list[float]:
        """Return the sum of squares of each tensor, in order."""
        read_together(self.unread)
        found = [0.0] * self._count
        for numbers, norms in self._of_devices:
            for number, norm in zip(numbers, norms.values(), strict=True):
                # `**` would raise OverflowError; this gives infinity.
                found[number] = norm * norm
        return found
