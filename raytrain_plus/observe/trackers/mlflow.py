"""Track a run in MLflow; the only module that imports it.

MLflow's own environment variables set its address and the experiment.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from raytrain_plus.observe.trackers.event_metrics import MetricValue

MOST_METRICS = 1000
MOST_PARAMS = 100
"""Maximum metrics and params in one request."""
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Mlflow:
    """A `Tracker` that writes to MLflow."""

    def __init__(self, client: MlflowClient, run: str, params: Sequence[Param]) -> None:
        """Continue the MLflow run with the id `run`; `params`: the parameters that it does not have yet."""
        self._client = client
        self._run = run
        self._params = list(params)

    def add(self, metrics: Sequence[MetricValue]) -> None:
        """See `Tracker`. Raises what MLflow raises."""
        self._settle()
        records = [
            Metric(_name(metric.name), metric.value, int(metric.time_s * 1000), metric.step) for metric in metrics
        ]
        for start in range(0, len(records), MOST_METRICS):
            self._client.log_batch(self._run, metrics=records[start : start + MOST_METRICS])

    def end(self, status: str) -> None:
        """See `Tracker`. Raises what MLflow raises."""
        self._settle()
        self._client.set_terminated(self._run, STATUS[status])

    def _settle(self) -> None:
        while self._params:
            self._client.log_batch(self._run, params=self._params[:MOST_PARAMS])
            del self._params[:MOST_PARAMS]


def begin(run: str | None, title: str, settings: Mapping[str, Any]) -> tuple[str, Mlflow]:
    """Continue MLflow's run of this id if it exists, else begin one; return its id and the tracker.

    Raises what MLflow raises.
    """
    for talkative in ("mlflow", "urllib3"):
        # A failure is reported once, by whoever calls this module.
        logging.getLogger(talkative).setLevel(logging.ERROR)
    client = MlflowClient()
    found = None if run is None else _found(client, run)
    if found is None:
        found = client.create_run(_experiment(client), run_name=title)
    else:
        client.update_run(found.info.run_id, status="RUNNING")
    # MLflow does not allow changing parameters: a resumed run keeps those that it began with.
    params = [Param(name, value) for name, value in params_of(settings) if name not in found.data.params]
    return found.info.run_id, Mlflow(client, found.info.run_id, params)


def params_of(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting as (dotted key, value as text)."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from params_of(value, f"{prefix}{key}.")
        else:
            yield _name(f"{prefix}{key}"), value if isinstance(value, str) else json.dumps(value)


def _found(client: MlflowClient, run: str) -> Any:
    try:
        found = client.get_run(run)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return found if found.info.lifecycle_stage == "active" else None


def _experiment(client: MlflowClient) -> str:
    """Return the id of the experiment that the environment names, else of MLflow's default."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if name is None:
        return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
    found = client.get_experiment_by_name(name)
    return client.create_experiment(name) if found is None else found.experiment_id


def _name(name: str) -> str:
    """Return a name with the characters that MLflow rejects replaced by `_`."""
    return re.sub(r"[^/\w.\- :]", "_", name)
