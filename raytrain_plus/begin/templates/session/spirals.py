"""Tell the points of three spirals apart, in a training loop of your own."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Session, schedules

ROWS, ARMS = 1_200, 3


def build(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.05), nn.Linear(width, ARMS)
    )


def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    scores = model(batch["at"])
    return {
        "loss": F.cross_entropy(scores, batch["arm"]),
        "accuracy": (scores.argmax(dim=1) == batch["arm"]).float().mean(),
    }


def main(session: Session, width: int = 64, lr: float = 1e-2) -> None:
    """The job's `args` are the arguments after the session."""
    model = session.model(lambda: build(width))
    session.optimizer(lambda named: torch.optim.AdamW([value for _, value in named], lr=lr))
    session.scheduler(lambda optimizer: schedules.warmup_cosine(optimizer, session.total_steps, warmup=0.05))
    session.evaluate(measure)
    # Without end: the run knows when it is over. The run makes the backward pass and the optimizer's step.
    for batch in session.batches():
        found = measure(model, batch)
        session.step(found["loss"], metrics={"accuracy": found["accuracy"]})


def prepare(folder: Path, name: str) -> None:
    """Write the split `name` into `folder`."""
    draw = torch.Generator().manual_seed(1 if name == "held_out" else 0)
    arm = torch.randint(ARMS, (ROWS,), generator=draw)
    radius = torch.rand(ROWS, generator=draw)
    angle = 4 * radius + arm * (2 * math.pi / ARMS) + 0.1 * torch.randn(ROWS, generator=draw)
    at = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    points = pa.FixedSizeListArray.from_arrays(pa.array(at.reshape(-1).numpy()), 2)
    table = pa.table({"at": points, "arm": pa.array(arm.numpy())})
    pq.write_table(table, folder / "spirals.parquet", row_group_size=100, write_page_checksum=True)
