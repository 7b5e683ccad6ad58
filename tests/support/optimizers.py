"""Tasks with an optimizer each, and holders of their state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from raytrain_plus import Data, Job, Task, Workers
from raytrain_plus.data.dataset import training_data
from raytrain_plus.data.of_job import rows_of
from raytrain_plus.state.named import named_state, state_sha256
from raytrain_plus.state.transfer import Holding
from raytrain_plus.trial.task_trial import Trial, try_on_cpu

CPU = torch.device("cpu")


class Net(nn.Module):
    """A model that makes its own optimizer, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Plain(Task):
    def model(self) -> nn.Module:
        self.net = Net()
        return self.net

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return model(batch["x"]).float().pow(2).mean()


def job(folder: Path, task: type[Task], **changes: Any) -> Job:
    data = Data(path=str(folder / "data"), batch_size=8, shards=2)
    settings = {"workers": Workers(min=2), **changes}
    return Job(name="x", task=task, data=data, steps=3, storage=str(folder), **settings)


def trial(folder: Path, task: type[Task], **changes: Any) -> Trial:
    (folder / "data").mkdir(exist_ok=True)
    values = pa.FixedSizeListArray.from_arrays(pa.array([0.5] * 64, pa.float32()), 4)
    pq.write_table(pa.table({"x": values}), folder / "data" / "0.parquet")
    wanted = job(folder, task, **changes)
    return try_on_cpu(wanted, task, rows_of(wanted, training_data(wanted, []), None), None)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
]


class Holder:
    """A model with every kind of state that a step changes."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], seed: int, width: int = 5) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.model[2].bias.requires_grad_(False)
        self.model.register_buffer("hidden", torch.rand(2), persistent=False)
        self.named = [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]
        self.frozen = [(name, value) for name, value in self.model.named_parameters() if not value.requires_grad]
        self.optimizer = make([value for _, value in self.named])
        self.scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scales = {"2.weight": -30 - seed, f"{seed}": -20}

    def holding(self) -> Holding:
        buffers = dict(self.model.named_buffers())
        return Holding(buffers, self.named, self.frozen, self.optimizer, self.scheduler, self.scales)

    def step(self) -> None:
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 3)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def sha(self) -> str:
        return state_sha256(named_state(self.model, self.optimizer, self.named))
