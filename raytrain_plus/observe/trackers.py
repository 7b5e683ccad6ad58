"""Where a run's figures go: TensorBoard's files in its folder, and the trackers that the job names.

    controller   events -> figures -> Scalars                              tensorboard/
                                   -> Relay, a pipe, never waited for
                                        |
    `tracking`, a process for each      +-> its queue -> mlflow, wandb     wherever their own settings say

Their libraries take seconds to load, and change the environment of the process that they are in, which Ray's threads
read at the same time: before glibc 2.41 that crashes. So neither the controller nor the driver loads them.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol

import yaml

from raytrain_plus.errors import FolderGone, InputError
from raytrain_plus.observe.events import Event
from raytrain_plus.observe.metrics import Figure, Figures
from raytrain_plus.observe.tensorboard import Scalars
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages

log = logging.getLogger(__name__)

MODULE = "raytrain_plus.observe.tracking"
FOLDER = "trackers"
"""In a run's folder: for each tracker a file that says which of its runs this one is."""
LOAD_S = 20.0
"""Seconds that loading a tracker's library may take."""
END_S = 5.0
"""Seconds that a tracker has, when a run has ended, for what it has not taken by then."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Unless the user says otherwise: MLflow's own would be minutes, and what failed is tried again in any case."""
GOING_S = 2.0
"""Seconds that its process has to go after that."""
MOST_BYTES = 1 << 20
"""Of figures that the process has not read; what comes when there are more is dropped."""


class Tracker(Protocol):
    """Takes the figures of a run."""

    def add(self, figures: Sequence[Figure]) -> None:
        """Takes the next ones."""

    def end(self, status: str) -> None:
        """The run has `finished`, `stopped` or `failed`; what is left goes to where it belongs. Nothing comes after."""


def check_installed(names: Sequence[str]) -> None:
    """Raises `InputError` where a tracker's package is not installed here. Loads none."""
    for name in names:
        spec = find_spec(name)
        # W&B keeps its files in a folder `wandb`, which Python takes for a package without code.
        if spec is None or spec.origin is None:
            raise InputError(
                f"{name} is not installed on {socket.gethostname()}",
                where=f"trackers: {name}",
                remedy=f"pip install 'raytrain-plus[{name}]'",
            )


def settings_for(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """What an environment says to these trackers' libraries: all that begins with their names. May hold secrets."""
    prefixes = tuple(f"{name.upper()}_" for name in names)
    return {name: value for name, value in environment.items() if prefixes and name.startswith(prefixes)}


def begun(names: Sequence[str], run: Folder, job_yaml: str, environment: Mapping[str, str], where: str) -> list[Relay]:
    """These trackers, begun, for the run of a resolved job; see `Relay.begin`."""
    relays = [Relay(name, run) for name in names]
    for relay in relays:
        relay.begin(yaml.safe_load(job_yaml), environment, where)
    return relays


class Trackers:
    """All of a run's. What goes wrong with them is said once, and costs figures."""

    def __init__(self, run: Folder, relays: Sequence[Relay] = (), outages: Outages | None = None) -> None:
        """`relays`: the trackers that the job names, begun. `outages` hears whether TensorBoard's files grow."""
        self._scalars = Scalars(run.inside("tensorboard"), outages=outages)
        self._relays = relays
        self._figures = Figures()
        self._status = "failed"

    def add(self, event: Event) -> None:
        """Takes one event."""
        if event["kind"] == "run_finished":
            self._status = event["status"]
        figures = self._figures.of(event)
        if not figures:
            return
        for relay in self._relays:
            relay.add(figures)
        self._scalars.add(figures)

    def close(self) -> None:
        """Ends all, within seconds. Raises `OSError` where TensorBoard's files cannot be written."""
        for relay in self._relays:
            relay.end(self._status)
        for relay in self._relays:
            relay.close()
        self._scalars.end(self._status)

    def abandon(self) -> None:
        """The run is another controller's: what has not been taken yet is forgotten."""
        for relay in self._relays:
            relay.abandon()
        self._scalars.abandon()


class Relay:
    """A `Tracker` in a process of its own. Only `close` waits for it, and not for long."""

    def __init__(self, name: str, run: Folder) -> None:
        """`name`: of its package. `run`: where it is kept which of its runs this one is."""
        self._name = name
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: IO[bytes] | None = None
        self._listener = threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True)
        # Another thread may find that the run is somebody else's by now.
        self._writing = threading.RLock()
        self._owed = bytearray()
        self._dropped = 0
        self._over = False

    def begin(self, settings: Mapping[str, Any], environment: Mapping[str, str], where: str) -> None:
        """Starts its process, in the folder `where` if that is here; where a run goes on, its tracker's run does.

        `settings`: the resolved job; `environment`: see `settings_for`.
        """
        search = os.pathsep.join(filter(None, sys.path))
        known = {**PATIENCE, **os.environ, **environment, "PYTHONPATH": search}
        # One of W&B's own processes, on the machine of whoever started it.
        known.pop("WANDB_SERVICE", None)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, self._name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=where if Path(where).is_dir() else None,
                env=known,
                # A Ctrl-C is not for it: it goes when this process does.
                start_new_session=True,
            )
        except OSError as error:
            log.warning("%s cannot be started: %s", self._name, error)
            return
        self._pipe = self._process.stdin
        assert self._pipe is not None
        os.set_blocking(self._pipe.fileno(), False)
        self._listener.start()
        self._say({"run": self._kept(), "title": settings["name"], "settings": settings})

    def add(self, figures: Sequence[Figure]) -> None:
        """See `Tracker`."""
        if len(self._owed) < MOST_BYTES:
            self._say([astuple(figure) for figure in figures])
        else:
            self._dropped += len(figures)
            self._write()

    def end(self, status: str) -> None:
        """See `Tracker`."""
        self._over = True
        self._say({"end": status, "dropped": self._dropped})
        self._shut_if_written()

    def close(self) -> None:
        """Returns when its process is gone."""
        deadline = time.monotonic() + END_S
        while (pipe := self._pipe) is not None and (left := deadline - time.monotonic()) > 0:
            room = select.poll()
            room.register(pipe, select.POLLOUT)
            room.poll(1000 * left)
            self._write()
            self._shut_if_written()
        if self._process is not None:
            try:
                self._process.wait(LOAD_S + END_S + GOING_S)
            except subprocess.TimeoutExpired:
                log.warning("%s did not end in time; the run's last figures may be missing there", self._name)
        self.abandon()

    def abandon(self) -> None:
        """Ends its process at once."""
        self._over = True
        if self._process is not None:
            # Before its input ends, which it would take for the run's end.
            self._process.kill()
            self._process.wait()
            self._listener.join(GOING_S)
        self._shut()

    def _say(self, what: Any) -> None:
        with self._writing:
            if self._pipe is not None:
                self._owed += json.dumps(what).encode() + b"\n"
                self._write()

    def _write(self) -> None:
        """Hands on what the pipe takes without waiting."""
        with self._writing:
            try:
                while self._pipe is not None and self._owed:
                    del self._owed[: os.write(self._pipe.fileno(), self._owed)]
            except BlockingIOError:
                return
            except BrokenPipeError:
                # That its process has gone is told by the listener.
                self._shut()

    def _shut_if_written(self) -> None:
        if not self._owed:
            self._shut()

    def _shut(self) -> None:
        with self._writing:
            if self._pipe is not None:
                self._pipe.close()
            self._pipe = None
            self._owed.clear()

    def _listen(self) -> None:
        """Keeps what the process says of its run, and hands on what it warns of."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                told = json.loads(line)
                if "run" in told:
                    self._keep(told["run"])
                else:
                    log.warning("%s: %s", self._name, told["warning"])
        code = process.wait()
        if code and not self._over:
            log.warning("%s has ended with code %d; the run's further figures are missing there", self._name, code)

    def _kept(self) -> str | None:
        """The tracker's run that this one goes on with; None where it begins one."""
        try:
            return str(read_object(self._run, self._file, "")["run"])
        except FileNotFoundError:
            return None
        except (OSError, InputError, KeyError):
            log.warning("it cannot be read which of %s's runs this one is; it begins another", self._name)
            return None

    def _keep(self, run: str) -> None:
        try:
            self._run.write(self._file, [json.dumps({"run": run}).encode() + b"\n"])
        except (OSError, FolderGone) as error:
            log.warning("it cannot be kept which of %s's runs this one is: %s", self._name, error)

    @property
    def _file(self) -> str:
        return f"{FOLDER}/{self._name}.json"
