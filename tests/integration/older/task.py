"""The task of the runs in this folder; they cannot be resumed with another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task


class Block(nn.Module):
    """Has a parameter without a gradient, which AdamW decays if it gets one of zeros, as in older versions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1))
        self.unused = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


class Small(Task):
    """BatchNorm, dropout, AdamW with weight decay, and a scheduler."""

    def __init__(self, pad_s: float = 0.0) -> None:
        self.pad_s = pad_s

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {"in": lambda: nn.Linear(6, 8, bias=False), "one": Block, "two": Block, "out": lambda: nn.Linear(8, 3)}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=0.01, weight_decay=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(self.pad_s)
        return F.cross_entropy(model(batch["x"]), batch["y"])
