"""A worker's Ray actor. Kept apart from the worker, so that who only starts it does not load torch."""

from __future__ import annotations

import signal
import threading
from typing import Any


class WorkerActor:
    """Loads the worker in the process where it lives, and passes calls on to it."""

    def __init__(self, name: str) -> None:
        # Ray's own handler waits for the calls in progress, and `live` never ends; the raylet, which would end the
        # process then, may have left itself: it does, once drained, as soon as nobody takes room on its node. And in a
        # worker that still starts it raises, which ends up as a traceback of Ray's on the user's screen.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        from raytrain_plus.workers.worker import Worker

        self._worker = Worker(name)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls the worker's `method`."""
        return getattr(self._worker, method)(*arguments)

    def live(self) -> None:
        """Never answers: that this call fails is how the controller learns, at once, that the process is gone."""
        threading.Event().wait()
