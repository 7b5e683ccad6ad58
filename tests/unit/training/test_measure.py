"""Layer costs are measured by running the layers one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import TaskError
from raytrain_plus.training.measure import measure_layers
from raytrain_plus.training.model import layer_names

CPU = torch.device("cpu")
BATCH = Microbatch({"x": torch.randn(5, 6), "y": torch.tensor([0, 1, 2, 0, 1])}, 5)


class Slow(nn.Module):
    """A slow layer, forward and backward, that returns two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.02)
        return torch.tanh(x), x.detach()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.inner(both[0] + both[1])
        return found


BUILT: list[str] = []


def noted(name: str, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        if torch.get_default_device().type != "meta":
            BUILT.append(name)
        return build()

    return made


class Layered(Task):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {
            "frozen": noted("frozen", lambda: nn.Linear(6, 6).requires_grad_(False)),
            "wide": noted("wide", lambda: nn.Linear(6, 8, bias=False)),
            "slow": noted("slow", Slow),
            "head": noted("head", Both),
        }

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"] * 2), batch["y"])


class Plain(Layered):
    def layers(self) -> Any:
        return None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Slow(), Both())


def test_each_layer_is_measured_by_itself() -> None:
    BUILT.clear()
    frozen, wide, slow, head = measure_layers(Layered(), 3, CPU, BATCH)
    assert [layer.name for layer in (frozen, wide, slow, head)] == BUILT, "each is built once"
    assert slow.seconds > 0.02 > wide.seconds
    assert [layer.parameters for layer in (frozen, wide, slow, head)] == [0, 48, 0, 27]
    # A frozen layer has neither gradient nor optimizer state; the others have both, and keep their input or their
    # result.
    assert frozen.bytes == 42 * 4
    assert wide.bytes == 4 * 48 * 4
    assert head.bytes == 4 * 27 * 4
    assert [frozen.activations, wide.activations, slow.activations] == [0, 5 * 6 * 4, 5 * 8 * 4]
    assert head.activations >= 5 * 8 * 4


def test_a_plain_sequence_has_its_modules_as_layers() -> None:
    assert [layer.name for layer in measure_layers(Plain(), 3, CPU, BATCH)] == ["0", "1", "2"]


def test_a_model_without_an_order_of_layers() -> None:
    class Whole(Plain):
        def model(self) -> nn.Module:
            return Both()

    with pytest.raises(TaskError, match=r"does not declare its layers(.|\n)*an nn.Sequential"):
        layer_names(Whole(), 3)


def test_layer_names_are_found_without_values() -> None:
    class Large(Plain):
        def model(self) -> nn.Module:
            # One terabyte.
            return nn.Sequential(nn.Linear(1 << 19, 1 << 19), nn.Linear(1 << 19, 1))

    assert layer_names(Large(), 3) == ("0", "1")


def test_errors_about_overlapping_steps_name_the_layer() -> None:
    class Running(Plain):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Slow(), Both())

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.mask

    class Masked(Plain):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), Constant(), Slow(), Both())

    class Tied(Layered):
        def tied(self) -> dict[str, str]:
            return {"head.inner.weight": "wide.weight"}

    assert (
        len(measure_layers(Running(), 3, CPU, BATCH))
        == len(measure_layers(Masked(), 3, CPU, BATCH, overlaps=True))
        == 4
    )
    with pytest.raises(TaskError, match=r"the buffer '1\.running_mean' changes in a forward pass(.|\n)*LayerNorm"):
        measure_layers(Running(), 3, CPU, BATCH, overlaps=True)
    with pytest.raises(TaskError, match="'head.inner.weight' and 'wide.weight' are tied".replace(".", r"\.")):
        measure_layers(Tied(), 3, CPU, BATCH, overlaps=True)
