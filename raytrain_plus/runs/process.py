"""Identify a process so that others on the same machine can tell whether it has ended."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ENDED = ("Z", "X")
"""States of a process that has ended and that its parent has not reaped yet."""


def this_process() -> dict[str, str]:
    """Return what identifies this process besides its id; empty if the system does not provide it (no /proc)."""
    machine, born = _machine(), _born(os.getpid())
    return {"machine": machine, "born": born} if machine and born else {}


def lives(pid: int, machine: str, born: str) -> bool | None:
    """Return whether a process is alive; None if that cannot be known here.

    `machine` and `born` come from its own `this_process`. The state of a process is unknown if it is on another machine
    or in another container, or if the system does not show it.
    """
    if not machine or machine != _machine():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # The process exists and belongs to another user.
        pass
    now = _born(pid)
    return now == born if now else None


def _machine() -> str:
    """Return an identifier unique to this boot of the machine and this container's pid namespace; empty if unknown."""
    try:
        found = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return ""
    # Start times are counted from the boot as the time namespace sees it; older kernels have none.
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/time"))
    return " ".join(found)


def _born(pid: int) -> str:
    """Return a process's start time in clock ticks since boot, `ended` for a zombie; empty if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The second field is the command in parentheses, which may hold spaces and parentheses of its own.
    fields = stat.rpartition(")")[2].split()
    return "ended" if fields[0] in ENDED else fields[19]
