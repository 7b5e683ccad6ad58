"""Order the controllers of a run, as a worker hears of them: an outdated one is refused. Pure but for a lock."""

from __future__ import annotations

import threading

from raytrain_plus.errors import StaleController

PEER = -1
"""The epoch of calls between workers, which is not compared."""


class Epochs:
    """The newest controller that has called this worker: each has a higher epoch than those before."""

    def __init__(self) -> None:
        self._newest = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def admit(self, epoch: int) -> None:
        """Accept a call. Raises `StaleController` if a newer controller has called."""
        if epoch == PEER:
            return
        with self._changed:
            if epoch < self._newest:
                raise StaleController(f"controller {epoch} is refused: controller {self._newest} has taken over")
            if epoch > self._newest:
                self._newest = epoch
                self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Have every `wait` raise this error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, epoch: int) -> None:
        """Wait until a newer controller calls; raises the error of `fail`."""
        self.admit(epoch)
        with self._changed:
            while self._error is None and self._newest <= epoch:
                self._changed.wait()
            if self._error is not None:
                raise self._error
