"""Train the byte GPT with experts: each block has several networks, of which each byte uses one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from examples.byte_gpt import Embed, Head, prepare
from raytrain_plus import Task, schedules
from raytrain_plus.layers import Block, Experts, FeedForward

__all__ = ["MoEGPT", "prepare"]


class MoEGPT(Task):
    """Predict the next byte. `count`: experts of each block, of which each byte uses `top_k`; 0: one dense network."""

    def __init__(self, count: int = 8, top_k: int = 1, width: int = 128, depth: int = 4, lr: float = 2e-3) -> None:
        self.count, self.top_k, self.width, self.depth, self.lr = count, top_k, width, depth, lr

    def layers(self) -> Mapping[str, Callable[[], nn.Module]]:
        blocks = {f"block{number}": self._block for number in range(self.depth)}
        return {"embed": lambda: Embed(self.width, 0.0), **blocks, "head": lambda: Head(self.width)}

    def _block(self) -> nn.Module:
        width, hidden = self.width, 2 * self.width
        network = Experts(width, hidden, self.count, top_k=self.top_k) if self.count else FeedForward(width, hidden)
        return Block(width, heads=4, feed_forward=network)

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = list(parameters)
        matrices = [value for _, value in named if value.dim() > 1]
        others = [value for _, value in named if value.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return schedules.warmup_cosine(optimizer, self.run.total_steps, warmup=0.05, end=0.1)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        text = batch["bytes"].long()
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
