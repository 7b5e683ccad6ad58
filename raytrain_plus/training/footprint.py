"""Measure how much memory a step needs at two small numbers of rows, and extrapolate to the job's."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from raytrain_plus.torch_compat import CreatedStorages


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


def total_memory(device: torch.device | None = None) -> int:
    """Return the bytes of memory of a GPU; for a CPU or None, those that this process can have at most.

    They are this machine's, or fewer where a control group (a container) or `ulimit` sets a limit.
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return min(int(psutil.virtual_memory().total), *_group_limits(), *_own_limits())


def held_memory(device: torch.device) -> int:
    """Return the bytes of memory in use on a GPU by tensors; on a CPU, by this process."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def _group_limits() -> Iterator[int]:
    """Yield the limits of the control groups that contain this process, of both versions of the kernel's interface."""
    mine: dict[str, str] = {}
    with contextlib.suppress(OSError):
        mine = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for controller, root, file in (
        ("", "/sys/fs/cgroup", "memory.max"),
        ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    ):
        group = Path(root, mine.get(controller, "/").lstrip("/"))
        for folder in (group, *group.parents):
            # In a container the folder of its own group may be the root.
            with contextlib.suppress(OSError, ValueError):
                yield int((folder / file).read_text())


def _own_limits() -> Iterator[int]:
    """Yield the limits of this process: what it has, and what it can still add under each of its limits."""
    now = psutil.Process().memory_info()
    for kind, used in ((resource.RLIMIT_AS, now.vms), (resource.RLIMIT_DATA, now.data)):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield now.rss + max(0, limit - used)


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
