"""Measure how much memory a step needs at two small numbers of rows, and extrapolate to the job's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from raytrain_plus.torch_compat import CreatedStorages
from raytrain_plus.trial.memory_limits import held_memory


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of memory that a step needs: `fixed`, and `per_row` for each row of a microbatch."""

    fixed: float
    per_row: float

    def at(self, rows: int) -> float:
        """Return the bytes with microbatches of that many rows."""
        return self.fixed + self.per_row * rows

    def most_rows(self, room: float) -> int:
        """Return the most rows of a microbatch for which `room` bytes suffice; 0 if not even one row fits.

        >>> Footprint(10.0, 4.0).most_rows(31.0), Footprint(10.0, 4.0).most_rows(5.0)
        (5, 0)
        """
        left = room - self.fixed
        if left < self.per_row:
            return 0
        return int(left // self.per_row) if self.per_row else 1 << 62


def through(small: tuple[int, float], large: tuple[int, float]) -> Footprint:
    """Return the line through two measurements (rows, bytes); one through the larger if the bytes do not rise.

    >>> through((2, 14.0), (4, 18.0))
    Footprint(fixed=10.0, per_row=2.0)
    """
    (rows, used), (more_rows, more_used) = small, large
    per_row = max(0.0, (more_used - used) / (more_rows - rows)) if more_rows > rows else 0.0
    return Footprint(more_used - per_row * more_rows, per_row)


def kept_bytes(forward: Callable[[], object]) -> int:
    """Return the bytes that a forward pass makes and keeps until its backward pass, its result included."""
    with CreatedStorages() as created:
        kept = forward()
    found: int = created.living()
    del kept
    return found


def measure_footprint(
    device: torch.device, forward: Callable[[int], object], small: int, large: int, to_come: int
) -> Footprint:
    """Measure what a step needs; `forward` runs a forward pass with that many rows and returns its loss.

    Fixed are the memory that is in use now, on a CPU that of this process, and the bytes `to_come`, such as the
    optimizer's state. What the forward pass keeps grows with the rows; values that live only within an operation are
    not counted.
    """
    kept = through(*((rows, float(kept_bytes(partial(forward, rows)))) for rows in (small, large)))
    return Footprint(kept.fixed + held_memory(device) + to_come, kept.per_row)
