"""The network of a transformer's block: SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020), or GELU."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """(..., width) -> (..., width), over `hidden` features."""

    def __init__(self, width: int, hidden: int, *, gated: bool = True, bias: bool = False) -> None:
        """`gated`: SwiGLU, with three weights; else GELU, with two."""
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias) if gated else None
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        found: torch.Tensor = self.down(inner)
        return found
