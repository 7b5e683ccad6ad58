"""Send a run's metrics to the trackers that the job names, MLflow and Weights & Biases."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from raytrain_plus.errors import InputError
from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.trackers.bookmark import Bookmark
from raytrain_plus.observe.trackers.event_metrics import EventMetrics, MetricValue

CLIENT_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Defaults for MLflow, which the user can override. Its own would take minutes, and failures are retried anyway."""


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


class Tracked:
    """A `Listener` that sends the run's metrics to a tracker; a resumed run continues its tracker's run."""

    period_s = 1.0
    most = 200

    def __init__(self, name: str, settings: Mapping[str, Any], bookmark: Bookmark) -> None:
        """Load a tracker's library, and begin or continue its run. Raises what the library raises.

        `name`: its package; `settings`: the resolved job.
        """
        module = importlib.import_module(f"raytrain_plus.observe.trackers.{name}")
        self._tracker: Tracker
        bookmark.run, self._tracker = module.begin(bookmark.run, settings["name"], settings)
        # What it has begun is to be continued even if this process dies now.
        bookmark.store()
        self._metrics = EventMetrics()

    def hear(self, events: Sequence[RunEvent]) -> None:
        """See `Listener`. Raises what the tracker raises."""
        if metrics := [metric for event in events for metric in self._metrics.of(event)]:
            self._tracker.add(metrics)

    def end(self, status: str) -> None:
        """See `Listener`. Raises what the tracker raises."""
        self._tracker.end(status)
