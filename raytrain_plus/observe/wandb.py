"""Weights & Biases: the one place that loads it. Project and mode are what its own environment variables say."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from raytrain_plus.observe.metrics import Figure

STEP = "trainer/step"
"""W&B's own step only rises; of a run that goes on, or figures that come late, ours does not."""


class Wandb:
    """A `Tracker`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def add(self, figures: Sequence[Figure]) -> None:
        """See `Tracker`. Raises what W&B raises."""
        for (step, time_s), together in itertools.groupby(figures, lambda figure: (figure.step, figure.time_s)):
            values = {figure.name: figure.value for figure in together}
            self._run.log({**values, STEP: step, "_timestamp": time_s})

    def end(self, status: str) -> None:
        """See `Tracker`. Raises what W&B raises."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status == "failed"))


def begin(run: str | None, title: str, settings: Mapping[str, Any]) -> tuple[str, Wandb]:
    """Goes on with W&B's run of this id, or begins one; its id, and the tracker. Raises what W&B raises."""
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
