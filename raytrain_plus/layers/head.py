"""The end of a language model: features to scores of the next token."""

from __future__ import annotations

import torch
from torch import nn


class Head(nn.Module):
    """(rows, length, width) -> (rows, length, vocabulary): the scores, for `cross_entropy`.

    With tensor slices, a worker has the scores of its slices' tokens.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        scores: torch.Tensor = self.out(self.norm(x))
        return scores
