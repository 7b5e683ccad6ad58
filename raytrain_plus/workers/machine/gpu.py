"""The GPU of this process: its model and its UUID."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU."""

    model: str
    uuid: str
    """As NVML spells it."""

    def __str__(self) -> str:
        return f"{self.model} ({self.uuid})"


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU of a device; None for a CPU. Raises `RuntimeError` if the GPU does not answer."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.name, f"GPU-{found.uuid}")
