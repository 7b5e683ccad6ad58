"""Track a run in Weights & Biases; the only module that imports it.

W&B's own environment variables set the project and the mode.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from raytrain_plus.observe.trackers.event_metrics import MetricValue

STEP = "trainer/step"
"""The metric used as step: W&B's own step must rise, but ours does not in a resumed run or for late metrics."""


class Wandb:
    """A `Tracker` that writes to Weights & Biases."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def add(self, metrics: Sequence[MetricValue]) -> None:
        """See `Tracker`. Raises what W&B raises."""
        for (step, time_s), together in itertools.groupby(metrics, lambda metric: (metric.step, metric.time_s)):
            values = {metric.name: metric.value for metric in together}
            self._run.log({**values, STEP: step, "_timestamp": time_s})

    def end(self, status: str) -> None:
        """See `Tracker`. Raises what W&B raises."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status == "failed"))


def begin(run: str | None, title: str, settings: Mapping[str, Any]) -> tuple[str, Wandb]:
    """Continue W&B's run of this id, or begin one; return its id and the tracker. Raises what W&B raises."""
    begun = wandb.init(
        id=run or secrets.token_hex(4),
        name=os.environ.get("WANDB_NAME", title),
        resume="allow",
        config=dict(settings),
        allow_val_change=True,
        settings=wandb.Settings(console="off", silent=True),
    )
    begun.define_metric(STEP)
    begun.define_metric("*", step_metric=STEP)
    return begun.id, Wandb(begun)
