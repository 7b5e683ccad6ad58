"""Count how often each device has failed in a run. Pure.

A device that fails twice is broken. If two devices say the same in the same step, the task's code is at fault, such as
an index that is out of range; the group's state machine ends the run then, as for other errors of the task.
"""

from __future__ import annotations

from collections import Counter

MOST = 2
"""Failures after which a device is not used again."""


class Devices:
    """The failures so far, by device."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._said: set[tuple[str, str]] = set()

    def failed(self, device: str, fault: str) -> tuple[bool, bool]:
        """Record a failure. Return whether to use the device no more, and whether it may be the task's fault.

        A GPU that reports its own error again proves nothing about the task. `device` is empty for workers without
        GPUs.

        >>> devices = Devices()
        >>> devices.failed("A", "assert"), devices.failed("A", "assert"), devices.failed("B", "assert")
        ((False, True), (True, False), (False, True))
        """
        if not device:
            return False, True
        again = (device, fault) in self._said
        self._said.add((device, fault))
        self._failures[device] += 1
        return self._failures[device] >= MOST, not again
