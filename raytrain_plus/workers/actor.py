"""Define a worker's Ray actor, apart from the worker, so that a process that only starts it does not load torch."""

from __future__ import annotations

import signal
import threading
from typing import Any


class WorkerActor:
    """Loads the worker in its own process, and passes calls on to it."""

    def __init__(self, name: str) -> None:
        # Ray's own handler waits for the calls in progress, and `live` never ends. The raylet, which would then end the
        # process, may have left itself: once drained, it leaves as soon as nobody takes room on its node. In a worker
        # that still starts, the handler raises, which ends up as a Ray traceback on the user's screen.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        from raytrain_plus.workers.worker import Worker

        self._worker = Worker(name)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the worker's `method`."""
        return getattr(self._worker, method)(*arguments)

    def live(self) -> None:
        """Never answer: the failure of this call is how the controller learns, at once, that the process is gone."""
        threading.Event().wait()
