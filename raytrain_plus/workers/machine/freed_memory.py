"""Return freed memory to the system where it is short.

The C library keeps what is freed for the next allocation, up to as much again as a worker needs if layers are gathered:
a hole that a layer leaves between others is too small for the next layer, which needs a few bytes more to be aligned
(`memalign` in glibc before 2.38). To return it costs the next step fresh pages, so it is done only where memory is
short.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import psutil

from raytrain_plus.trial.memory_limits import is_memory_short

PERIOD_S = 0.1
"""Seconds between two looks. A preparing worker can free half a gigabyte a second."""
WORTH = 64 << 20
"""Bytes that a process must have taken since it returned some before it is asked again."""


def start_returning() -> None:
    """Return freed memory from now on whenever it is short, in a thread; do nothing if the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        threading.Thread(target=_run, args=(trim,), name="freed memory", daemon=True).start()


def _run(trim: Callable[[int], int]) -> None:
    process, after = psutil.Process(), 0
    while True:
        time.sleep(PERIOD_S)
        after = return_freed(trim, lambda: process.memory_info().rss, is_memory_short, after)


def return_freed(trim: Callable[[int], int], used: Callable[[], int], short: Callable[[], bool], after: int) -> int:
    """Return freed memory if it is short and this process has grown since the last time.

    Return the bytes that it used after the last time, which `after` is before.
    """
    if used() < after + WORTH or not short():
        return after
    trim(0)
    return used()
