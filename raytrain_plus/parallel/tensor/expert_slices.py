"""Experts that are divided between slices: each slice computes the tokens of its own experts.

All hosts of a stage have the same activations, and the sum over slices is made in the fixed tree (`link`), so a token's
result has the same bits whoever hosts its experts. An all-to-all of the tokens was slower on two and on four hosts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.func import functional_call

from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.modules import Leaf, summed
from raytrain_plus.parallel.tensor.positions import copies
from raytrain_plus.parallel.tensor.slice_plan import SliceKind
from raytrain_plus.torch_compat import without_values


class StackedExperts(nn.Module):
    """Experts whose parameters have a first dimension of `num_experts`; `parallel.experts` cuts it.

    (tokens, width), their experts (tokens, k), and the weights of these (tokens, k) -> (tokens, width). A token whose
    expert is `num_experts` has none in that place. Those of Transformers are alike.
    """

    num_experts: int


class ExpertSlices(nn.Module):
    """The hosted slices of `StackedExperts`, which takes and returns the same."""

    def __init__(self, module: nn.Module, slices: Mapping[int, Leaf], each: int, link: Link) -> None:
        """Compute as `module` with the parameters of `slices`, by number, which have `each` experts."""
        super().__init__()
        self.cut: tuple[SliceKind, int] = ("column", 1)
        self._link = link
        self._each = each
        # In tuples: the parameters belong to the slices.
        self._slices = tuple(slices.items())
        one = without_values(module)
        one.num_experts = each  # type: ignore[assignment]
        if "_is_expert_parallel" in vars(one):
            # Transformers' grouped and batched products leave `num_experts` out only if they are told of it.
            vars(one)["_is_expert_parallel"] = True
        self._one = (one,)

    def forward(self, given: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See the class."""
        [one] = self._one
        one.training = self.training
        count = len(self._slices)
        shared = copies(self._link, count, given, weights.to(given.dtype))
        parts = []
        for at, (number, leaf) in enumerate(self._slices):
            own = index - number * self._each
            own = own.masked_fill((own < 0) | (own >= self._each), self._each)
            own_weights = shared[count + at].to(weights.dtype)
            parts.append(functional_call(one, dict(leaf.named_parameters()), (shared[at], own, own_weights)))
        return summed(self._link, parts)
