"""Send a run's metrics to TensorBoard's files in its folder and to the trackers that the job names.

    controller   events -> metrics -> Scalars                              tensorboard/
                                   -> Relay, a non-blocking pipe
                                        |
    `tracking`, a process for each      +-> its queue -> mlflow, wandb     as configured by their own settings

The trackers' libraries take seconds to load, and change the environment of their process while Ray's threads read it:
before glibc 2.41 that crashes. So neither the controller nor the driver loads them.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from importlib.util import find_spec
from typing import Any, Protocol

import yaml

from raytrain_plus.errors import FolderGone, InputError
from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.trackers.event_metrics import EventMetrics, MetricValue, evaluation_metrics
from raytrain_plus.observe.trackers.side_process import SideProcess, environment_with
from raytrain_plus.observe.trackers.tensorboard import Scalars
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages

log = logging.getLogger(__name__)

MODULE = "raytrain_plus.observe.trackers.tracking"
FOLDER = "trackers"
"""The folder in a run's folder that holds, for each tracker, a file with the id of the tracker's run."""
LOAD_S = 20.0
"""Maximum seconds for loading a tracker's library."""
END_S = 5.0
"""Maximum seconds for a tracker to take the remaining metrics after the run has ended."""
CLIENT_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Defaults for MLflow, which the user can override. Its own would take minutes, and failures are retried anyway."""
GOING_S = 2.0
"""Maximum seconds for a tracker's process to exit after that."""
MOST_BYTES = 1 << 20
"""Maximum bytes of metrics that the process has not read yet; further metrics are dropped."""


class Tracker(Protocol):
    """A receiver of a run's metrics."""

    def add(self, metrics: Sequence[MetricValue]) -> None:
        """Take the next metrics."""

    def end(self, status: str) -> None:
        """Deliver the remaining metrics and end: the run has `finished`, `stopped` or `failed`."""


def check_installed(names: Sequence[str]) -> None:
    """Raise `InputError` if a tracker's package is not installed here. Does not import the packages."""
    for name in names:
        spec = find_spec(name)
        # W&B keeps its files in a folder `wandb`, which Python treats as a namespace package.
        if spec is None or spec.origin is None:
            raise InputError(
                f"{name} is not installed on {socket.gethostname()}",
                where=f"trackers: {name}",
                remedy=f"pip install 'raytrain-plus[{name}]'",
            )


def settings_for(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of these trackers: those that begin with their names. May contain secrets."""
    prefixes = tuple(f"{name.upper()}_" for name in names)
    return {name: value for name, value in environment.items() if prefixes and name.startswith(prefixes)}


def start_trackers(
    names: Sequence[str], run: Folder, job_yaml: str, environment: Mapping[str, str], where: str
) -> list[Relay]:
    """Start these trackers for the run of a resolved job; see `Relay.begin`."""
    relays = [Relay(name, run) for name in names]
    for relay in relays:
        relay.begin(yaml.safe_load(job_yaml), environment, where)
    return relays


class Trackers:
    """All trackers of a run. A failing tracker is reported once and loses metrics; it never fails the run."""

    def __init__(
        self,
        run: Folder,
        relays: Sequence[Relay] = (),
        outages: Outages | None = None,
        evaluated: Callable[[int], Mapping[str, float]] = lambda step: {},
    ) -> None:
        """Begin with TensorBoard and the `relays`, the started trackers that the job names.

        `outages` records failed writes of TensorBoard's files. `evaluated` returns the evaluation metrics of the state
        after a step, if it was evaluated.
        """
        self._evaluated = evaluated
        self._scalars = Scalars(run.inside("tensorboard"), outages=outages)
        self._relays = relays
        self._metrics = EventMetrics()
        self._status = "failed"

    def add(self, event: RunEvent) -> None:
        """Send the metrics of one event to all trackers."""
        if event["kind"] == "run_finished":
            self._status = event["status"]
        if event["kind"] == "resumed":
            self._restart(event["step"], event["time"])
        metrics = self._metrics.of(event)
        if not metrics:
            return
        for relay in self._relays:
            relay.add(metrics)
        self._scalars.add(metrics)

    def _restart(self, step: int, time_s: float) -> None:
        """Make the metrics of the steps after `step` void in TensorBoard.

        An evaluation of the state that the run resumes from has the number of the first void step, and still counts.
        """
        self._scalars.restart(time_s, step + 1)
        self._scalars.add(evaluation_metrics(step, self._evaluated(step), time_s))

    def close(self) -> None:
        """End all trackers within seconds. Raises `OSError` if TensorBoard's files cannot be written."""
        for relay in self._relays:
            relay.end(self._status)
        for relay in self._relays:
            relay.close()
        self._scalars.end(self._status)

    def abandon(self) -> None:
        """Discard the metrics that have not been taken yet: the run belongs to another controller."""
        for relay in self._relays:
            relay.abandon()
        self._scalars.abandon()


class Relay:
    """A `Tracker` in a separate process. Only `close` waits for that process, for a limited time."""

    def __init__(self, name: str, run: Folder) -> None:
        """Prepare a tracker; `name`: its package. The run's folder `run` stores the id of the tracker's run."""
        self._name = name
        self._run = run
        self._process: SideProcess | None = None
        self._listener = threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True)
        self._dropped = 0
        self._over = False

    def begin(self, settings: Mapping[str, Any], environment: Mapping[str, str], where: str) -> None:
        """Start the process, in the folder `where` if it exists here; a resumed run continues its tracker's run.

        `settings`: the resolved job; `environment`: see `settings_for`.
        """
        known = {**CLIENT_TIMEOUTS, **environment_with(environment)}
        # It refers to one of W&B's own processes, on the machine where the run was started.
        known.pop("WANDB_SERVICE", None)
        try:
            self._process = SideProcess(MODULE, [self._name], known, where)
        except OSError as error:
            log.warning("%s cannot be started: %s", self._name, error)
            return
        self._listener.start()
        self._process.say({"run": self._kept(), "title": settings["name"], "settings": settings})

    def add(self, metrics: Sequence[MetricValue]) -> None:
        """See `Tracker`."""
        if self._process is None:
            return
        if self._process.owed < MOST_BYTES:
            self._process.say([astuple(metric) for metric in metrics])
        else:
            self._dropped += len(metrics)
            self._process.write()

    def end(self, status: str) -> None:
        """See `Tracker`."""
        self._over = True
        if self._process is not None:
            self._process.say({"end": status, "dropped": self._dropped})
            self._process.end_input()

    def close(self) -> None:
        """Wait until the process has exited, with a time limit, then kill it."""
        if self._process is not None and not self._process.close(END_S, LOAD_S + END_S + GOING_S):
            log.warning("%s did not end in time; it may lack the run's last metrics", self._name)
        self.abandon()

    def abandon(self) -> None:
        """Kill the process at once."""
        self._over = True
        if self._process is not None:
            self._process.kill()
            self._listener.join(GOING_S)

    def _listen(self) -> None:
        """Store the id of the tracker's run that the process reports, and log its warnings."""
        assert self._process is not None
        code = self._process.listen(self._hear)
        if code and not self._over:
            log.warning("%s exited with code %d; it receives no further metrics of the run", self._name, code)

    def _hear(self, told: Mapping[str, str]) -> None:
        if "run" in told:
            self._keep(told["run"])
        else:
            log.warning("%s: %s", self._name, told["warning"])

    def _kept(self) -> str | None:
        """Return the id of the tracker's run to continue; None to begin one."""
        try:
            return str(read_object(self._run, self._file, "")["run"])
        except FileNotFoundError:
            return None
        except (OSError, InputError, KeyError):
            log.warning("cannot read the id of this run in %s; starting a new run there", self._name)
            return None

    def _keep(self, run: str) -> None:
        try:
            self._run.write(self._file, [json.dumps({"run": run}).encode() + b"\n"])
        except (OSError, FolderGone) as error:
            log.warning("cannot store the id of this run in %s: %s", self._name, error)

    @property
    def _file(self) -> str:
        return f"{FOLDER}/{self._name}.json"
