"""Do slow work for a run's folder beside the controller's loop, and log what the storage does not take."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from raytrain_plus.controller.record.ownership import Ownership
from raytrain_plus.errors import RunError
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages, outage_of

CLOSE_S = 120.0
"""Maximum seconds to wait at a run's end."""

log = logging.getLogger(__name__)


class Aside:
    """Threads that work for a run's folder. If the storage fails (a full disk, say), the training continues."""

    def __init__(self, run: Folder, ownership: Ownership, outages: Outages) -> None:
        self._run = run
        self._ownership = ownership
        self._outages = outages
        # The lease is renewed even while ledger and events are being written.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="journal")
        self._begun: set[Future[None]] = set()

    def later(self, act: Callable[[], None], failing: str) -> Future[None]:
        """Run `act` on a thread; `failing` says what does not work if it raises."""

        def done() -> None:
            try:
                act()
            except OSError as error:
                self.say_once(failing, error)
            except RunError as error:
                # The loop ends the run with this error.
                log.info("%s", self._ownership.lost or error)
            except Exception:
                log.exception("%s", failing)

        future = self._threads.submit(done)
        self._begun = {one for one in self._begun if not one.done()} | {future}
        return future

    def say_once(self, failing: str, error: OSError) -> None:
        """Log a failure of the storage in one line, unless its cause is reported already."""
        if not self._outages.knows(outage_of(error, self._run)):
            log.warning("%s: %s", failing, error)

    def close(self) -> None:
        """Wait until all of it is done, for at most `CLOSE_S`."""
        _, left = wait(self._begun, CLOSE_S)
        if left:
            log.warning("the storage has not answered within %g s, so %d pieces of work are left", CLOSE_S, len(left))
        self._threads.shutdown(wait=not left, cancel_futures=True)
