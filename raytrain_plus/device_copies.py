"""Copies between the host and its device: few, together, and beside the computation.

A copy from a GPU makes the host wait until the GPU has done all earlier work, and the GPU then waits until the host has
requested more. So a step reads what it must know at one place, with `read_together`. What goes to a GPU is copied from
pinned memory, from which the GPU fetches it by itself. On a CPU all of this is the same, and costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch


class Numbers:
    """Some numbers of a device, which the host reads when it first needs them."""

    __slots__ = ("on_device", "read")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Take a tensor of any shape, of real numbers that float64 can hold; it must not change until it is read."""
        self.on_device = tensor.detach().reshape(-1)
        self.read: torch.Tensor | None = None
        """The same numbers on the host, in float64, once they are read."""

    def host(self) -> torch.Tensor:
        """Return the numbers on the host, as a flat float64 tensor."""
        if self.read is None:
            read_together([self])
        assert self.read is not None, "it has just been read"
        return self.read

    def values(self) -> list[float]:
        """Return the numbers."""
        found: list[float] = self.host().tolist()
        return found


def read_together(numbers: Iterable[Numbers]) -> None:
    """Read all of these numbers that have not been read, with one copy for each device."""
    of_devices: dict[torch.device, list[Numbers]] = defaultdict(list)
    for one in numbers:
        if one.read is None:
            of_devices[one.on_device.device].append(one)
    for found in of_devices.values():
        joined = to_host(torch.cat([one.on_device.to(torch.float64) for one in found]))
        for one, host in zip(found, joined.split([len(one.on_device) for one in found]), strict=True):
            one.read = host


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host. The host waits for its device."""
    return tensor.cpu()


def from_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device. Neither waits for the other."""
    if device.type != "cuda":
        return tensor.to(device)
    # Pinned memory is not used again before this copy has ended: torch's allocator sees to that.
    return tensor.pin_memory().to(device, non_blocking=True)
