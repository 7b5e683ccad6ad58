"""Build a small worker state after one step. Not a test itself."""

from __future__ import annotations

import torch

from raytrain_plus.state.holding import Holding


def holding() -> Holding:
    model = torch.nn.Linear(5, 3)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([value for _, value in named])
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return Holding({}, named, [], optimizer, None, {"weight": -3})
