"""Training functions with loops of their own, and the same as a task."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Session, Task


def build() -> nn.Module:
    # No bias in front of BatchNorm, and no kink: see `tasks.Net`.
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))


def measured(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scores = model(batch["x"])
    return F.cross_entropy(scores, batch["y"]), (scores.argmax(1) == batch["y"]).float().mean()


class Same(Task):
    """What `main` is, as a task."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def model(self) -> nn.Module:
        return build()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=1e-2)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=self.run.total_steps)

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        loss, accuracy = measured(model, batch)
        return {"loss": loss, "metrics": {"accuracy": accuracy}}


def main(session: Session, folder: str, pad_s: float = 0.0) -> None:
    """Leave a line in the file of its process each time it is begun, and when it is left."""
    model = session.model(build)
    session.optimizer(lambda named: torch.optim.AdamW([value for _, value in named], lr=1e-2))
    session.scheduler(lambda made: torch.optim.lr_scheduler.LinearLR(made, total_iters=session.total_steps))
    note = Path(folder) / f"begun-{os.getpid()}"
    with note.open("a") as file:
        file.write("begun\n")
    for batch in session.batches():
        if pad_s:
            time.sleep(pad_s)
        loss, accuracy = measured(model, batch)
        session.step(loss, metrics={"accuracy": accuracy})


def remembering(session: Session, folder: str, pad_s: float = 0.0) -> None:
    """Train with a rate that depends on the losses so far; stop at step 20 if there is a file `stop`."""
    model = session.model(build)
    session.after_step(lambda state, metrics: {"mean": 0.9 * state.get("mean", 1.0) + 0.1 * metrics["loss"]})
    for batch in session.batches():
        if pad_s:
            time.sleep(pad_s)
        if session.steps == 20 and (Path(folder) / "stop").exists():
            session.stop()
        session.step(measured(model, batch)[0] * session.state.get("mean", 1.0))
