"""What a storage refuses for a while - a full disk, a busy server - is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from raytrain_plus.errors import StorageError

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds between the tries."""


def tried(act: Callable[[], T]) -> T:
    """What `act` returns, which is called again after each pause while it raises `OSError`.

    Raises `StorageError` where the last try failed, too; the message says why, and how often it was tried.
    """
    for pause_s in PAUSES_S:
        try:
            return act()
        except OSError:
            time.sleep(pause_s)
    try:
        return act()
    except OSError as failure:
        raise StorageError(f"{failure} (tried {len(PAUSES_S) + 1} times)") from failure
