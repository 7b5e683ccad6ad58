"""Steps of a small model on any shards, and the hash of its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raytrain_plus import Task
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.state.named import named_state, state_sha256
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique

SHARDS = 12


STEPS = 5


CPU = torch.device("cpu")


class Net(nn.Module):
    """A model with everything whose order could matter, and many error-prone features."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
        self.tied = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.nothing = nn.Parameter(torch.zeros(0))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("counter", torch.tensor(2**60 + 1))
        self.register_buffer("signed", torch.tensor([-0.0, 1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        # Recomputed in the backward pass, including BatchNorm and dropout.
        x = checkpoint(self.inner, x, use_reentrant=False)
        x = self.tied(torch.tanh(self.tied(x))) + self.frozen(x)
        scores = self.last(x)
        if self.training:
            # Another tensor replaces the buffer, as in much user code.
            self.average = 0.9 * self.average + 0.1 * scores.detach().mean(dim=0)
            self.counter += 1
        return scores


class Noisy(torch.optim.AdamW):
    """An optimizer that draws random numbers in its step."""

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for value in group["params"]:
                    value.add_(1e-4 * torch.randn_like(value))
        return done


class Small(Task):
    """BatchNorm, dropout, AdamW, clipping, shared weights, and rows with unequal weights."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.calls = 0

    def model(self) -> nn.Module:
        # `to` would keep the imaginary parts.
        return (
            Net()
            if self.dtype == torch.float32
            else Net()._apply(lambda t: t.to(self.dtype) if t.dtype == torch.float32 else t)
        )

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return Noisy([value for _, value in parameters], lr=1e-2)

    def buffer_rule(self, name: str) -> Any:
        return "first" if name in ("counter", "signed") else None

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.calls += 1
        batch["y"].add_(1).remainder_(3)  # a task may write into its batch
        weight = float(1 + batch["y"].sum()) * float(batch["x"].abs().max())
        return {"loss": nn.functional.cross_entropy(model(batch["x"]), batch["y"]), "weight": weight}


def steps_of(task: Task | None = None, exact: bool = True) -> SynchronousSteps:
    return whole_steps(state_of(task, exact))


def state_of(task: Task | None = None, exact: bool = True) -> TrainState:
    task = task or Small()
    built = build_model(task, 3, CPU)
    # Small buckets, so that there are several.
    return TrainState(
        task, [built], Summing(SHARDS, exact=exact, bucket_bytes=600), seed=3, technique=Technique(clip_norm=0.5)
    )


def batches(step: int, hosted: Sequence[int], dtype: torch.dtype = torch.float32) -> dict[int, list[Microbatch]]:
    made = {}
    for shard in hosted:
        generator = torch.Generator().manual_seed(1000 * step + shard)
        made[shard] = [
            Microbatch(
                {
                    # In step 3 the inputs, and with them the weights, are a thousand times larger: the grid no longer
                    # fits.
                    "x": torch.randn(4, 6, generator=generator).to(dtype) * (1000 if step == 3 else 1),
                    "y": torch.randint(0, 3, (4,), generator=generator),
                },
                4,
            )
            for _ in range(2)
        ]
    return made


def sha(state: TrainState) -> str:
    return state_sha256(named_state(state.module, state.optimizer, state.named))
