"""A backward pass in two parts: which weights get their gradients when, and what it does not support."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus.errors import TrainingError
from raytrain_plus.parallel.pipeline.chunk import Chunk, Objective
from raytrain_plus.parallel.pipeline.transport import flattened


class Work:
    """A microbatch of rows whose loss is their square."""

    def rows(self, microbatch: int) -> int:
        return 2

    def batch(self, microbatch: int) -> torch.Tensor:
        return torch.ones(2, 4, requires_grad=True)

    def loss(self, microbatch: int, model: nn.Module, batch: torch.Tensor) -> Objective:
        return Objective(model(batch).square().sum(), 1.0)

    def computing(self, kind: str, chunk: int, microbatch: int, weight: Any = None) -> Any:
        return nullcontext()


def in_two_parts(layers: nn.Module) -> list[str]:
    """Run a microbatch through a chunk that is the last of two; return the weights in the order of their gradients."""
    names = {id(value): name for name, value in layers.named_parameters()}
    received: list[str] = []
    chunk = Chunk(
        layers, 1, [0, 0], splits=True, received=lambda values: received.extend(names[id(value)] for value in values)
    )
    chunk.begin(Work(), 1)  # type: ignore[arg-type]
    chunk.set_local_fwd_input(flattened(torch.ones(2, 4, requires_grad=True), "a test"), 0)
    chunk.forward_one_chunk(0)
    chunk.backward_one_chunk(0, full_backward=False)
    chunk.backward_weight_one_chunk(0)
    return received


def test_the_last_weights_get_their_gradients_first() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    assert in_two_parts(layers) == ["2.weight", "0.weight"]
    expected = torch.autograd.grad(layers(torch.ones(2, 4)).square().sum(), list(layers.parameters()))
    for value, gradient in zip(layers.parameters(), expected, strict=True):
        assert value.grad is not None
        torch.testing.assert_close(value.grad, gradient)


def test_a_weight_that_is_used_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.randn(4)) for _ in range(2))
            self.both = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(x * (self.one * self.both))
            return torch.tanh(x * (self.other * self.both))

    with pytest.raises(TrainingError, match="uses a weight twice, which the zero-bubble schedule does not support"):
        in_two_parts(nn.Sequential(Twice()))
