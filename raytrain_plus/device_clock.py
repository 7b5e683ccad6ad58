"""When a device did something: a GPU works later than the host requests it, and notes the times itself.

A time is known once the device is past it, as it is past all that the host has read the results of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a device's work."""

    host: float = field(default_factory=time.perf_counter)
    """When the host requested it, in seconds; on a CPU, when it was."""
    event: torch.cuda.Event | None = None

    def seconds_to(self, later: Mark) -> float:
        """Return the seconds between two moments of one device; waits if the device is not past the later one."""
        if self.event is None or later.event is None:
            return later.host - self.host
        if not later.event.query():
            later.event.synchronize()
        milliseconds: float = self.event.elapsed_time(later.event)
        return milliseconds / 1000.0


def marks(device: torch.device) -> Callable[[], Mark]:
    """Return a function that marks the end of what has been requested of a device by now, on the current stream."""
    return _gpu_mark if device.type == "cuda" else Mark


def _gpu_mark() -> Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return Mark(event=event)
