"""A classifier whose steps are made in any precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job.setting_types import Precision as Name
from raytrain_plus.task import Task
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique

CPU = torch.device("cpu")


SHARDS, ROWS, STEPS = 2, 8, 5


class Classifier(Task):
    """`seen`: the dtypes in which its model computed."""

    def __init__(self) -> None:
        self.seen: list[torch.dtype] = []

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=1e-2)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        scores = model(batch["x"])
        self.seen.append(scores.dtype)
        return F.cross_entropy(scores.float(), batch["y"]) * batch["times"]


def batches(step: int, slope: float = 1.0) -> dict[int, list[Microbatch]]:
    made = {}
    for shard in range(SHARDS):
        draw = torch.Generator().manual_seed(100 * step + shard)
        x, y = torch.randn(ROWS, 6, generator=draw), torch.randint(0, 3, (ROWS,), generator=draw)
        given = {"x": x, "y": y, "times": torch.ones(()), "slope": torch.tensor(slope)}
        made[shard] = [Microbatch(given, ROWS, start=step, ids=step + shard)]
    return made


def steps_of(
    name: Name, task: Task, exact: bool = False, decay: float | None = None, clip_value: float | None = None
) -> SynchronousSteps:
    state = TrainState(
        task,
        [build_model(task, 1, CPU)],
        Summing(SHARDS, exact=exact),
        seed=1,
        technique=Technique(Precision(name), decay=decay, clip_value=clip_value, clip_norm=1.0),
    )
    return whole_steps(state)
