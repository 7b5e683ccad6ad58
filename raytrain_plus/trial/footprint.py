"""Measure how much memory a step needs at two small numbers of rows, and extrapolate to the job's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from raytrain_plus.parallel.per_row import PerRow, through
from raytrain_plus.torch_compat import CreatedStorages
from raytrain_plus.trial.memory_limits import held_memory


def kept_bytes(forward: Callable[[], object]) -> int:
    """Return the bytes that a forward pass makes and keeps until its backward pass, its result included."""
    with CreatedStorages() as created:
        kept = forward()
    found: int = created.living()
    del kept
    return found


def measure_footprint(
    device: torch.device, forward: Callable[[int], object], small: int, large: int, to_come: int
) -> PerRow:
    """Measure what a step needs; `forward` runs a forward pass with that many rows and returns its loss.

    Fixed are the memory that is in use now, on a CPU that of this process, and the bytes `to_come`, such as the
    optimizer's state. What the forward pass keeps grows with the rows; values that live only within an operation are
    not counted.
    """
    kept = through(*((rows, float(kept_bytes(partial(forward, rows)))) for rows in (small, large)))
    return PerRow(kept.fixed + held_memory(device) + to_come, kept.per_row)
