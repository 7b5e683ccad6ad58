"""Call a function periodically on a thread of its own, until it is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STOP_S = 120.0
"""Maximum seconds to wait for the last call: a folder of another machine may never answer."""


class PeriodicCall:
    """A periodic call, which begins with `start`."""

    def __init__(self, act: Callable[[], bool], period_s: float, rest: float, name: str) -> None:
        """Call `act` every `period_s` seconds, with pauses of at least `rest` times the duration of the last call.

        `act` returns whether it is to be called again. `name` is the name of the thread.
        """
        self._act = act
        self._period_s = period_s
        self._rest = rest
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, unless it was started or stopped before."""
        if not (self._thread.ident or self._over.is_set()):
            self._thread.start()

    def stop(self) -> None:
        """Stop; return once the last call has ended. Raises `TimeoutError` if it has not within `STOP_S`."""
        self._over.set()
        if self._thread.ident:
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                raise TimeoutError(f"the storage has not taken the {self._thread.name} within {STOP_S:g} s")

    def _run(self) -> None:
        pause_s = self._period_s
        while not self._over.wait(pause_s):
            start = time.monotonic()
            if not self._act():
                return
            pause_s = max(self._period_s, self._rest * (time.monotonic() - start))
