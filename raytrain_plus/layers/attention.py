"""Causal attention of several heads, with rotary positions; several heads may share keys and values."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus.layers.rotary import rotated


class Attention(nn.Module):
    """(rows, length, width) -> (rows, length, width).

    Vaswani et al., "Attention Is All You Need", 2017; Ainslie et al., "GQA: Training Generalized Multi-Query
    Transformer Models from Multi-Head Checkpoints", 2023.
    """

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, *, bias: bool = False) -> None:
        """Attend with `heads` heads; `kv_heads`, the number of heads of keys and values, divides it (default: equal).

        Raises `ValueError` for numbers that do not divide each other.
        """
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if width % heads or heads % kv_heads or width // heads % 2:
            raise ValueError(f"{width} features, {heads} heads and {kv_heads} heads of keys do not divide each other")
        self.head_dim = width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head_dim, bias=bias) for _ in range(2))
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        # As many heads as are here: a worker may host some slices.
        q, k, v = (one(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in (self.q, self.k, self.v))
        q, k = rotated(q), rotated(k)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        found: torch.Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return found
