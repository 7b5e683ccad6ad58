"""The handle of a detached run: follow, inspect, rescale and stop it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raytrain_plus.errors import InputError, RunError
from raytrain_plus.launch.request import Request, RescaleRequest, StopRequest
from raytrain_plus.launch.request_process import send_apart
from raytrain_plus.observe.run_events import RunEvent, read_events
from raytrain_plus.observe.views.progress import view_for
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import find_run
from raytrain_plus.runs.follow import seen, watch
from raytrain_plus.runs.status import Status, state_of, status
from raytrain_plus.storage.address import split
from raytrain_plus.storage.interface import Folder


def attach(run: str | Path, storage: str = "runs") -> Handle:
    """Return the handle of a run, given the path or address of its folder, or its name under `storage`.

    Raises `InputError` if there is no such run.
    """
    return Handle(find_run(str(run), storage))


class FollowInterrupted(KeyboardInterrupt):
    """The user stopped waiting for a run; the run continues.

    It is a `KeyboardInterrupt`, so that a script, or the notebook cells after this one, end too. A notebook shows its
    message without a traceback.
    """

    def __init__(self, name: str) -> None:
        """Build the message for the run of this name."""
        super().__init__(f"{name} continues in the background: follow() shows it again, stop() ends it")

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of a traceback."""
        return [str(self)]


class Handle:
    """The handle of a run, based on its folder alone.

    Only `stop` and `rescale` affect the run; losing the handle does not.
    """

    def __init__(self, folder: Folder, ended: Result | None = None) -> None:
        """Build the handle of the run in this folder; `ended`: its result, if it had finished before it was started."""
        self._run = folder
        self.ended = ended
        """The result of a run that had finished before it was started, so that nothing was trained; else None."""
        self.name = split(folder.address)[1]
        self.path = folder.path or folder.address
        """The run's folder: a path, or an address if `storage` is one."""

    def __repr__(self) -> str:
        return f"<run {self.name}: {state_of(self._run)}>"

    def _repr_html_(self) -> str:
        """Return a static picture of the run so far for a notebook; `follow` shows a live one."""
        return seen(self._run).html()

    def status(self) -> Status:
        """Return the run's state, steps and checkpoints."""
        return status(self._run)

    def events(self, kind: str | None = None) -> list[RunEvent]:
        """Return the events so far, optionally of one kind only."""
        return [event for event in read_events(self._run) if kind is None or event["kind"] == kind]

    def follow(self) -> Result:
        """Show the run's progress until it ends; return its result. In a notebook cell this is a live chart.

        An interrupt stops only the following, not the run, and raises `FollowInterrupted`.
        """
        if self.ended is not None:
            view_for(sys.stdout).finish(self.ended)
            return self.ended
        with self._waiting():
            return watch(self._run, view_for(sys.stdout))

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait silently until the run ends; return its result, even if it failed.

        Raises `TimeoutError` after `timeout_s`, `RunError` if the run's controller is gone and left no result, and
        `FollowInterrupted` as `follow` does.
        """
        if self.ended is not None:
            return self.ended
        with self._waiting():
            return watch(self._run, None, timeout_s=timeout_s)

    def stop(self) -> None:
        """Ask the run to stop at the next step boundary and save its state; return once it has the request.

        Raises `RunError` if the run cannot be reached.
        """
        self._send(StopRequest())

    def rescale(self, *, min: int | None = None, max: int | None = None, spares: int | None = None) -> None:
        """Request other values of `workers.min`, `workers.max` and `workers.spares`; return once the run has them.

        Surplus workers leave at a step boundary; missing ones join when they are ready. Raises `RunError` if the run
        cannot be reached, or its job does not support these numbers.
        """
        if min is max is spares is None:
            raise RunError("set at least one of min, max and spares")
        self._send(RescaleRequest(min, max, spares))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            raise FollowInterrupted(self.name) from None

    def _send(self, request: Request) -> None:
        try:
            send_apart(self._run, request)
        except InputError as error:
            raise RunError(str(error)) from error
