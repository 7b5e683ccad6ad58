"""The networks of some experts: each computes the tokens that were sent to it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from raytrain_plus.parallel.tensor.expert_slices import StackedExperts


class ExpertNetworks(StackedExperts):
    """(tokens, width), their experts (tokens, k), and the weights of these (tokens, k) -> (tokens, width).

    Each expert is a network as `FeedForward` without biases. A token whose expert is `num_experts` has none in that
    place. The result of a token is the sum, in the order of its places, of what its experts make of it, times their
    weights.
    """

    def __init__(self, width: int, hidden: int, count: int, *, gated: bool = True) -> None:
        """`count` experts with `hidden` features each; `gated`: SwiGLU, with three weights; else GELU, with two."""
        super().__init__()
        self.num_experts = count
        self.gate = nn.Parameter(_drawn(count, width, hidden)) if gated else None
        self.up = nn.Parameter(_drawn(count, width, hidden))
        self.down = nn.Parameter(_drawn(count, hidden, width))

    def forward(self, given: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See the class."""
        places, offsets = sorted_places(index, self.num_experts)
        rows: torch.Tensor = _Taken.apply(given, places, index.shape[1])
        up = grouped_product(rows, self.up, offsets)
        inner = F.gelu(up) if self.gate is None else F.silu(grouped_product(rows, self.gate, offsets)) * up
        made = grouped_product(inner, self.down, offsets)
        made = made * weights.reshape(-1)[places].to(made.dtype).unsqueeze(1)
        found: torch.Tensor = _Put.apply(made, places, len(given), index.shape[1])
        return found.to(given.dtype)


def _drawn(count: int, inputs: int, outputs: int) -> torch.Tensor:
    """Return weights as `nn.Linear` draws them."""
    return torch.empty(count, inputs, outputs).uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs))


def sorted_places(index: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places that have one of `count` experts, by expert, and where the places of each expert end.

    `index`: (tokens, k); place t * k + j is that of token t's expert j. Places of an expert keep their order.

    >>> [found.tolist() for found in sorted_places(torch.tensor([[1, 0], [2, 1], [0, 2]]), 2)]
    [[1, 4, 0, 3], [2, 4]]
    """
    experts, places = index.reshape(-1).sort(stable=True)
    offsets = torch.searchsorted(experts, torch.arange(1, count + 1, device=experts.device), out_int32=True)
    return places[: int(offsets[-1])], offsets


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the product of each group of rows with its own matrix: (rows, in), (groups, in, out) -> (rows, out).

    `offsets`: where each group ends.
    """
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weights = rows.to(dtype), weights.to(dtype)
    if len(rows) and _grouped_serves(rows, weights):
        return F.grouped_mm(rows, weights, offs=offsets)
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    return torch.cat([part @ one for part, one in zip(rows.split(sizes), weights, strict=True)])


def _grouped_serves(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    """Return whether `grouped_mm` takes these: their rows must begin at multiples of 16 bytes."""
    dtypes = (torch.float32, torch.bfloat16) if rows.device.type == "cpu" else (torch.bfloat16,)
    return rows.dtype in dtypes and all(size * rows.element_size() % 16 == 0 for size in weights.shape[1:])


class _Taken(torch.autograd.Function):
    """The tokens at some places: (tokens, width) -> (places, width)."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, places: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.tokens, ctx.k = len(given), k
        return given[places // k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        [places] = ctx.saved_tensors
        return _put(gradient, places, ctx.tokens, ctx.k), None, None


class _Put(torch.autograd.Function):
    """The sum over the places of each token, zero where nothing is: (places, width) -> (tokens, width)."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, places: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.k = k
        return _put(made, places, tokens, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        [places] = ctx.saved_tensors
        return gradient[places // ctx.k], None, None, None


def _put(made: torch.Tensor, places: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
    # Each place is written once, and places are added in order, so the bits do not depend on threads.
    each = made.new_zeros(tokens * k, made.shape[1]).index_copy_(0, places, made)
    return each if k == 1 else each.view(tokens, k, made.shape[1]).sum(1)
