"""Define a worker's Ray actor, apart from the worker, so that a process that only starts it does not load torch."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil

from raytrain_plus.workers.epochs import PEER, Epochs
from raytrain_plus.workers.imports import Imports, import_all

if TYPE_CHECKING:
    from raytrain_plus.workers.controller_watch import ControllerProcess, ControllerWatch
    from raytrain_plus.workers.messages import AdoptionReport


class WorkerActor:
    """Loads the worker in its own process, and passes calls on to it."""

    def __init__(
        self, controller: ControllerProcess | None, name: str | None = None, place: str = "", cpus: float = 0
    ) -> None:
        """Load the worker of that name. Without a name this is a standby: it waits for `become`.

        `controller`: what this process watches, if anything; `place`: the name of its placement group; `cpus`: the CPUs
        of the worker that a standby replaces; it has been started without any.
        """
        # Ray's own handler waits for the calls in progress, and `live` never ends. The raylet, which would then end the
        # process, may have left itself: once drained, it leaves as soon as nobody takes room on its node. In a worker
        # that still starts, the handler raises, which ends up as a Ray traceback on the user's screen.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._worker: Future[Any] = Future()
        self._epochs = Epochs()
        self._place = place
        self._run = None if controller is None else controller.run
        # Two threads that import modules in a cycle can see half of one.
        self._importing = threading.Lock()
        self._threads = {} if name is not None else _threads_of_a_worker(cpus)
        self._watch = None if controller is None else self._watch_of(controller)
        if name is not None:
            self._become(name)

    def become(self, name: str, place: str) -> None:
        """Load the worker of that name; if that fails, end the process, so that it counts as lost.

        `place`: the name of the placement group that is the worker's.
        """
        self._place = place
        try:
            self._become(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def call(self, epoch: int, method: str, *arguments: Any) -> Any:
        """Call the worker's `method`; in a standby that becomes a worker, once it is one.

        `epoch`: that of the controller that calls, or `PEER`. Raises `StaleController` if a newer one has called.
        """
        self._epochs.admit(epoch)
        if epoch != PEER and self._watch is not None:
            self._watch.heard()
        worker = self._worker.result()
        os.environ.update(self._threads)
        return getattr(worker, method)(*arguments)

    def standing(self, epoch: int, controller: ControllerProcess) -> tuple[str, AdoptionReport] | None:
        """Return the name of its placement group, and what a controller that adopts it must know.

        None if it is no prepared worker. From now on it obeys that controller only.
        """
        self._epochs.admit(epoch)
        if self._watch is not None:
            self._watch.follow(controller)
        report = self._worker.result().standing() if self._worker.done() else None
        return None if report is None else (self._place, report)

    def live(self, epoch: int) -> None:
        """Answer only a controller that is outdated: by the failure of this call it learns at once of a process's end.

        Raises `DeviceBroken` if the process must not be used any more.
        """
        self._epochs.wait(epoch)

    def leave(self) -> None:
        """Write what the next controller of the run needs of this worker; return once that is done."""
        if self._worker.done() and self._run is not None:
            self._worker.result().leave(self._run)

    def hears(self) -> bool:
        """Return whether this process has heard a controller a moment ago."""
        return self._watch is not None and self._watch.hears()

    def respond(self) -> None:
        """Answer, so that the controller knows that this process is not stopped."""

    def load(self, imports: Imports) -> None:
        """Import all that a worker will need; see `import_all`.

        The workers beside it have the processors first: a step waits for the slowest of them.
        """
        with self._importing:
            os.environ.update(self._threads)
            thread = threading.Thread(target=_last, args=(import_all, imports), name="imports", daemon=True)
            thread.start()
            thread.join()

    def _become(self, name: str) -> None:
        with self._importing:
            os.environ.update(self._threads)
            from raytrain_plus.workers.machine.device_fault import Brokenness
            from raytrain_plus.workers.machine.freed_memory import start_returning
            from raytrain_plus.workers.worker import Worker
        start_returning()
        self._worker.set_result(Worker(name, broken=Brokenness(self._epochs.fail)))

    def _watch_of(self, controller: ControllerProcess) -> ControllerWatch:
        # Not before there is an actor: it loads Ray.
        from raytrain_plus.workers.controller_watch import ControllerWatch, end_workers, others_hear

        return ControllerWatch(
            controller,
            others_hear=lambda: others_hear(controller.run),
            leave=self.leave,
            written=lambda: self._worker.result().writing() if self._worker.done() else None,
            end=lambda led: end_workers(controller.run, self._place, led),
        )


def _last(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function on this thread, whose priority falls to the lowest and cannot rise again."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    function(*arguments)


def _threads_of_a_worker(cpus: float) -> dict[str, str]:
    """Return the variable by which Ray limits the threads of NumPy and others in a worker with `cpus` CPUs.

    In a standby, Ray sets it in each call to 1. In a process that was started with it, Ray leaves it alone.
    """
    given = "OMP_NUM_THREADS" in psutil.Process().environ()
    return {} if given else {"OMP_NUM_THREADS": str(max(1, int(cpus)))}
