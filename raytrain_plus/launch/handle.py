"""A run that goes on by itself, for who wants to know of it or to stop it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raytrain_plus.errors import RunError
from raytrain_plus.observe.events import Event, read_events
from raytrain_plus.observe.progress import view_for
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import find_run
from raytrain_plus.runs.follow import seen, watch
from raytrain_plus.runs.status import Status, state_of, status
from raytrain_plus.storage.address import split
from raytrain_plus.storage.interface import Folder

WISH_S = 60.0
"""Limit of telling a run what is wished of it."""


def attach(run: str | Path, storage: str = "runs") -> Handle:
    """The handle of a run, by its folder's path or address, or by its name under `storage`.

    Raises `InputError` where there is none.
    """
    return Handle(find_run(str(run), storage))


class Interrupted(KeyboardInterrupt):
    """The user no longer waits for a run, which goes on.

    An interrupt still, so that a script and the cells after this one end, too; but a notebook shows its words alone.
    """

    def __init__(self, name: str) -> None:
        """Of the run of this name."""
        super().__init__(f"{name} goes on without being watched: follow() shows it again, stop() ends it")

    def _render_traceback_(self) -> list[str]:
        """Asked for by IPython, which else shows where the code was."""
        return [str(self)]


class Handle:
    """Knows the run by its folder alone. Nothing that it does, or that becomes of it, disturbs the run, but a wish."""

    def __init__(self, folder: Folder) -> None:
        self._run = folder
        self.name = split(folder.address)[1]
        self.path = folder.path or folder.address
        """The run's folder: a path, or the address where `storage` is one."""

    def __repr__(self) -> str:
        return f"<run {self.name}: {state_of(self._run)}>"

    def _repr_html_(self) -> str:
        """In a notebook: the run so far, as a picture that stands still; `follow` shows one that moves."""
        return seen(self._run).html()

    def status(self) -> Status:
        """How far it has come, and what checkpoints it has."""
        return status(self._run)

    def events(self, kind: str | None = None) -> list[Event]:
        """What has happened so far, of one kind if wanted."""
        return [event for event in read_events(self._run) if kind is None or event["kind"] == kind]

    def follow(self) -> Result:
        """Shows what happens until the run has ended; its result. In a notebook's cell: the chart, drawn as it goes on.

        An interrupt ends the watching alone, and raises `Interrupted`.
        """
        with self._waiting():
            return watch(self._run, view_for(sys.stdout))

    def result(self, timeout_s: float | None = None) -> Result:
        """Waits in silence until the run has ended; its result, also where it failed.

        Raises `TimeoutError` after `timeout_s`, `RunError` where the run's controller is gone without a word, and
        `Interrupted` as `follow` does.
        """
        with self._waiting():
            return watch(self._run, None, timeout_s=timeout_s)

    def stop(self) -> None:
        """Asks the run to stop at the next step boundary and to save its state; returns when it has heard.

        Raises `RunError` where it cannot be reached.
        """
        self._wish("stop", "--no-wait")

    def rescale(self, *, min: int | None = None, max: int | None = None, spares: int | None = None) -> None:
        """Wishes other numbers of workers, `min`, `max` and `spares` of `workers`; returns when the run has heard.

        Those that are too many leave at a step boundary, those that are missing join when they are ready. Raises
        `RunError` where the run cannot be reached, or its job does not bear them.
        """
        wished = {"--min": min, "--max": max, "--spares": spares}
        self._wish("rescale", *(f"{name}={count}" for name, count in wished.items() if count is not None))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(self.name) from None

    def _wish(self, *words: str) -> None:
        # A process of its own: this one may be connected to another Ray, or to none, and stays so.
        command = [sys.executable, "-m", "raytrain_plus", *words, self._run.address]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=WISH_S)
        except subprocess.TimeoutExpired:
            raise RunError(f"the run {self.name} did not hear within {WISH_S:.0f} s") from None
        if told.returncode:
            raise RunError(told.stderr.strip() or f"the run {self.name} cannot be reached")
