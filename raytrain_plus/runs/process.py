"""Name a process so that others on the same machine can tell whether it has ended."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ENDED = ("Z", "X")
"""States of a process that has ended and that its parent has not asked about yet."""


def this_process() -> dict[str, str]:
    """Return what identifies this process beside its id; empty if the system does not say it (no /proc)."""
    machine, born = _machine(), _born(os.getpid())
    return {"machine": machine, "born": born} if machine and born else {}


def lives(pid: int, machine: str, born: str) -> bool | None:
    """Return whether a process lives; None if that cannot be known here.

    `machine` and `born` come from its own `this_process`. Nothing is known of processes on another machine or in
    another container, or if the system does not show their state.
    """
    if not machine or machine != _machine():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # It is another user's, and there.
        pass
    now = _born(pid)
    return now == born if now else None


def _machine() -> str:
    """Return what this boot of this machine and this container's process ids have alone; empty if unknown."""
    try:
        found = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return ""
    # Start times are counted from the boot as the time namespace sees it; older kernels have none.
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/time"))
    return " ".join(found)


def _born(pid: int) -> str:
    """Return a process's start in clock ticks since the boot, `ended` for one that is a zombie; empty if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The second field is the command in parentheses, which may hold spaces and parentheses of its own.
    fields = stat.rpartition(")")[2].split()
    return "ended" if fields[0] in ENDED else fields[19]
