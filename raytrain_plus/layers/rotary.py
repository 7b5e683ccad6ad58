"""Rotary positions: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021."""

from __future__ import annotations

import torch


def rotated(x: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
    """Return queries or keys (rows, heads, length, head_dim) turned by angles that grow with their position.

    The first half of a head's features is paired with the second, as in Llama. `base`: the largest angle's denominator.
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    powers = torch.arange(half, dtype=torch.float32, device=x.device) / half
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=x.device), base**-powers)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
