"""What a storage refuses for a while - a full disk, a busy server - is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from raytrain_plus.errors import StorageError

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds between the tries."""
LAST_PAUSES_S = (*PAUSES_S, 8.0, 8.0, 8.0)
"""The same at a run's end: nothing is written later."""


def tried(
    act: Callable[[], T],
    pauses_s: Sequence[float] | None = None,
    failed: Callable[[OSError], None] = lambda error: None,
) -> T:
    """What `act` returns, which is called again after each pause while it raises `OSError`.

    `pauses_s`: seconds, `PAUSES_S` by default; `failed` gets each error. Raises `StorageError` where the last try
    failed, too; the message says why, and how often it was tried.
    """
    pauses_s = PAUSES_S if pauses_s is None else pauses_s
    for pause_s in (*pauses_s, None):
        try:
            return act()
        except OSError as error:
            failed(error)
            if pause_s is None:
                raise StorageError(f"{error} (tried {len(pauses_s) + 1} times)") from error
            time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")
