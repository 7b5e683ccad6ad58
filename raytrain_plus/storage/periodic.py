"""Something that is done again and again on a thread of its own, until it is stopped. Knows nothing of what it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Repeated:
    """Begins when it is started."""

    def __init__(self, act: Callable[[], bool], period_s: float, rest: float, name: str) -> None:
        """Calls `act` every `period_s` seconds; where it takes long, `rest` times as long as it took lies between.

        `act` says whether it is to be called again. `name` is the thread's.
        """
        self._act = act
        self._period_s = period_s
        self._rest = rest
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins, unless it has, or was stopped."""
        if not (self._thread.ident or self._over.is_set()):
            self._thread.start()

    def stop(self) -> None:
        """Returns when nothing is done any more."""
        self._over.set()
        if self._thread.ident:
            self._thread.join()

    def _run(self) -> None:
        pause_s = self._period_s
        while not self._over.wait(pause_s):
            start = time.monotonic()
            if not self._act():
                return
            pause_s = max(self._period_s, self._rest * (time.monotonic() - start))
