"""Retry storage operations that fail for a while, as on a full disk or a busy server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from raytrain_plus.errors import StorageError

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds between attempts."""
LAST_PAUSES_S = (*PAUSES_S, 8.0, 8.0, 8.0)
"""Seconds between attempts at the end of a run, after which nothing is written any more."""


def retry(
    act: Callable[[], T],
    pauses_s: Sequence[float] | None = None,
    failed: Callable[[OSError], None] = lambda error: None,
) -> T:
    """Return the result of `act`, which is called again after each pause while it raises `OSError`.

    `pauses_s`: seconds, default `PAUSES_S`; `failed` gets each error. Raises `StorageError` if the last attempt fails
    too; the message gives the reason and the number of attempts.
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
    raise AssertionError("the last attempt returns or raises")
