"""How much the workers' GPUs are used, as their drivers report it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_plus.storage.size_text import size_text

EVENT_S = 30.0
"""Minimum seconds between two events that tell of GPUs: a run of days keeps all of its events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """A reading of a worker's GPU, of all processes on it; None for what its driver does not report."""

    utilisation: float | None
    """The share of the driver's last sample period, under a second, in which the GPU computed."""
    memory_bytes: int | None
    """The memory that is in use."""
    power_w: float | None
    """The power that the GPU draws, in watts."""


class GpuUses:
    """The newest reading of each worker, until it is in an event."""

    def __init__(self) -> None:
        self._newest: dict[str, GpuUse] = {}
        self._due = 0.0

    def add(self, worker: str, use: GpuUse) -> None:
        """Add a worker's reading."""
        self._newest[worker] = use

    def fields(self, members: Collection[str], now: float) -> dict[str, Any]:
        """Return the field of an event with the readings of these workers since the last such event.

        It is empty if there are none, or `EVENT_S` have not passed. `now`: in Unix seconds.
        """
        if not self._newest or now < self._due:
            return {}
        found = {worker: asdict(use) for worker, use in self._newest.items() if worker in members}
        self._newest.clear()
        if not found:
            return {}
        self._due = now + EVENT_S
        return {"gpus": found}


def gpu_text(use: Mapping[str, Any]) -> str:
    """Return a reading from an event as text.

    >>> gpu_text({"utilisation": 0.93, "memory_bytes": 61_200_000_000, "power_w": 512.4})
    'GPU 93 % busy, 61.2 GB in use, 512 W'
    >>> gpu_text({"utilisation": None, "memory_bytes": None, "power_w": None})
    ''
    """
    utilisation, memory, power_w = use["utilisation"], use["memory_bytes"], use["power_w"]
    said = [
        "" if utilisation is None else f"{100 * utilisation:.0f} % busy",
        "" if memory is None else f"{size_text(memory)} in use",
        "" if power_w is None else f"{power_w:.0f} W",
    ]
    text = ", ".join(filter(None, said))
    return f"GPU {text}" if text else ""
