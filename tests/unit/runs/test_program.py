"""Programs of models, and the dimensions that vary in them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raytrain_plus.runs.program import exported, taken


class Patches(nn.Module):
    """It takes lengths that are multiples of 4."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], -1, 4).sum(-1)


class Summed(nn.Module):
    def forward(self, x: torch.Tensor, other: torch.Tensor, scale: float) -> torch.Tensor:
        return (x + other) * scale


@pytest.mark.parametrize(
    ("module", "shape", "takes"),
    [
        (nn.Linear(4, 2), (3, 4), "input: float32 (n, 4)"),
        (nn.Linear(4, 2), (1, 4), "input: float32 (1, 4)"),
        (nn.Conv1d(3, 2, 3), (4, 3, 8), "input: float32 (n, 3, m)"),
        (nn.Sequential(nn.Conv1d(3, 2, 3), nn.Flatten(), nn.Linear(12, 1)), (4, 3, 8), "input: float32 (n, 3, 8)"),
        (Patches(), (3, 16), "x: float32 (n, m)"),
        (nn.ReLU(), (3,), "input: float32 (n,)"),
    ],
)
def test_dimensions_vary_if_the_model_runs_with_others(module: nn.Module, shape: tuple[int, ...], takes: str) -> None:
    assert taken(exported(module, (torch.ones(shape),), {})) == takes


def test_dimensions_of_one_size_vary_together_and_arguments_keep_their_names() -> None:
    x = torch.ones(3, 3)
    assert taken(exported(Summed(), (), {"scale": 2.0, "other": x.clone(), "x": x})) == (
        "other: float32 (n, m), x: float32 (n, m)"
    )
