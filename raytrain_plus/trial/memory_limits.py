"""Find how much memory a process can have, on this machine, in its control groups and by its own limits."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

MOST_USED = 0.8
"""Part of the memory; if processes use more, it counts as short."""


def total_memory(device: torch.device | None = None) -> int:
    """Return the bytes of memory of a GPU; for a CPU or None, those that this process can have at most.

    They are this machine's, or fewer where a control group (a container) or `ulimit` sets a limit.
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    groups = (limit for limit, _ in _groups())
    return min(int(psutil.virtual_memory().total), *groups, *_own_limits())


def held_memory(device: torch.device) -> int:
    """Return the bytes of memory in use on a GPU by tensors; on a CPU, by this process."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def is_memory_short() -> bool:
    """Return whether most of the memory of this machine, or of a control group here, is in use by processes."""
    machine = psutil.virtual_memory()
    return machine.available < (1 - MOST_USED) * machine.total or any(
        _used(folder) > MOST_USED * limit for limit, folder in _groups() if limit < machine.total
    )


def _groups() -> Iterator[tuple[int, Path]]:
    """Yield limit and folder of the control groups that contain this process, in both versions of the interface."""
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
                yield int((folder / file).read_text()), folder


def _used(group: Path) -> int:
    """Return the bytes that the processes of a control group use, files apart; 0 if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        known = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(known.get("anon", known.get("total_rss", 0)))
    return 0


def _own_limits() -> Iterator[int]:
    """Yield the limits of this process: what it has, and what it can still add under each of its limits."""
    now = psutil.Process().memory_info()
    for kind, used in ((resource.RLIMIT_AS, now.vms), (resource.RLIMIT_DATA, now.data)):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield now.rss + max(0, limit - used)
