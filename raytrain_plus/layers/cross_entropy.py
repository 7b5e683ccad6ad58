"""Cross entropy of scores whose tokens are divided between tensor slices: no worker needs the scores of all tokens.

Shoeybi et al., "Megatron-LM", 2019, section 3: the workers exchange one number or two for each position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from raytrain_plus.parallel.tensor.modules import Hosted, hosted_by


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the mean cross entropy, in float32, over all positions whose label is not `ignore_index`.

    `scores` (..., vocabulary): as the model has returned them; `labels` (...): integers. Without slices, and for any
    other scores, this is `torch.nn.functional.cross_entropy`.
    """
    hosted = hosted_by(scores)
    if hosted is None:
        return F.cross_entropy(scores.flatten(0, -2).float(), labels.flatten(), ignore_index=ignore_index)
    counted = labels != ignore_index
    losses: torch.Tensor = _CrossEntropy.apply(scores, labels.masked_fill(~counted, 0), hosted)
    return losses.masked_fill(~counted, 0.0).sum() / counted.sum()


class _CrossEntropy(torch.autograd.Function):
    """The loss of each position; sums over tokens are made slice by slice, and then in the fixed tree."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, labels: torch.Tensor, hosted: Hosted) -> torch.Tensor:
        parts = [part.float() for part in scores.chunk(len(hosted.starts), -1)]
        largest = hosted.link.largest([part.amax(-1) for part in parts])
        powers = [(part - largest.unsqueeze(-1)).exp() for part in parts]
        own = [_own(labels, start, part, hosted.whole) for part, start in zip(parts, hosted.starts, strict=True)]
        chosen = [torch.where(here, _at(part, place), 0.0) for part, (here, place) in zip(parts, own, strict=True)]
        pairs = [torch.stack([power.sum(-1), one]) for power, one in zip(powers, chosen, strict=True)]
        total, score = hosted.link.sum(pairs)
        ctx.save_for_backward(total, *powers, *(value for pair in own for value in pair))
        ctx.dtype = scores.dtype
        losses: torch.Tensor = total.log() + largest - score
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total, *saved = ctx.saved_tensors
        count = len(saved) // 3
        found = []
        for power, here, place in zip(saved[:count], saved[count::2], saved[count + 1 :: 2], strict=True):
            chances = power / total.unsqueeze(-1)
            chances.scatter_add_(-1, place.unsqueeze(-1), -here.to(chances.dtype).unsqueeze(-1))
            found.append(chances * gradient.unsqueeze(-1))
        return torch.cat(found, -1).to(ctx.dtype), None, None


def _own(labels: torch.Tensor, start: int, part: torch.Tensor, whole: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which labels are tokens of a slice, and their places in it; 0 for others.

    The first and the last slice keep labels outside the vocabulary, which then raise an error.
    """
    place = labels - start
    here = torch.ones_like(place, dtype=torch.bool)
    if start:
        here &= place >= 0
    if start + part.shape[-1] < whole:
        here &= place < part.shape[-1]
    return here, place.masked_fill(~here, 0)


def _at(part: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return part.gather(-1, place.unsqueeze(-1)).squeeze(-1)
