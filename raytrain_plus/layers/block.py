"""A transformer's block: attention and a network, each after RMSNorm and with a residual connection."""

from __future__ import annotations

import torch
from torch import nn

from raytrain_plus.layers.attention import Attention
from raytrain_plus.layers.feed_forward import FeedForward


class Block(nn.Module):
    """(rows, length, width) -> (rows, length, width).

    Norms: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        hidden: int | None = None,
        gated: bool = True,
        feed_forward: nn.Module | None = None,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        """`hidden`: features of the network; default: 4 times `width`, or 8/3 times if `gated`, a multiple of 64.

        `feed_forward`: a network of another kind, such as `Experts`; then `hidden` and `gated` say nothing.
        `dropout`: of what attention and network return. Others: see `Attention` and `FeedForward`.
        """
        super().__init__()
        if hidden is None:
            hidden = -(-8 * width // (3 * 64)) * 64 if gated else 4 * width
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads, bias=bias)
        self.feed_forward = feed_forward or FeedForward(width, hidden, gated=gated, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        found: torch.Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return found
