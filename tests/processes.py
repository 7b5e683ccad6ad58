"""Which processes have ended, including those that are nobody's children here."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


def runs(process: psutil.Process) -> bool:
    """Return whether a process runs: not one that has ended, even if its parent has not collected its status yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def still_alive(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all of these have ended; return those that have not in time."""
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in processes if runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive
