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
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TaskError
from raytrain_plus.job.settings import Schedule
from raytrain_plus.parallel.pipeline.layout import Chunks, partition_layers
from raytrain_plus.parallel.pipeline.partition import counted_cost
from raytrain_plus.training.model.model import layer_names
from raytrain_plus.training.model.precision import FP32
from raytrain_plus.training.weights.step_options import PLAIN
from raytrain_plus.trial.measure import count_operations, measure_layers

CPU = torch.device("cpu")
BATCH = Microbatch({"x": torch.randn(5, 6), "y": torch.tensor([0, 1, 2, 0, 1])}, 5)


class Slow(nn.Module):
    """A slow layer, forward and backward, that returns two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.05)
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


def test_the_operations_of_the_layers_are_those_of_the_whole_model() -> None:
    whole = count_operations(Layered(), 0, FP32, BATCH, staged=False)
    # Of the frozen layer and the first trained one, no gradient is for an input.
    assert whole == {"": 2 * 5 * (6 * 6 + 2 * 6 * 8 + 3 * 8 * 3)}
    layers = count_operations(Layered(), 0, FP32, BATCH, staged=True)
    assert (layers["frozen"], layers["wide"], layers["slow"]) == (2 * 5 * 36, 2 * 5 * 2 * 48, 0)
    assert sum(layers.values()) == whole[""]


def test_each_layer_is_measured_by_itself() -> None:
    BUILT.clear()
    frozen, wide, slow, head = measure_layers(Layered(), 3, PLAIN, BATCH)
    assert [layer.name for layer in (frozen, wide, slow, head)] == BUILT, "each is built once"
    # Their passes take nearly no time beside the sleep, in which only that layer is.
    assert slow.seconds >= 0.05
    assert slow.seconds == max(layer.seconds for layer in (frozen, wide, slow, head))
    assert [layer.parameters for layer in (frozen, wide, slow, head)] == [0, 48, 0, 27]
    # A frozen layer has neither gradient nor optimizer state; the others have both. All keep their results.
    assert frozen.bytes == 42 * 4
    assert wide.bytes == 4 * 48 * 4
    assert head.bytes == 4 * 27 * 4
    assert [frozen.activations, wide.activations, slow.activations] == [5 * 6 * 4, 5 * 8 * 4, 5 * 8 * 4]
    assert head.activations >= 5 * 8 * 4


def test_counted_costs_have_the_operations_of_both_passes_and_the_values() -> None:
    counted = measure_layers(Layered(), 3, PLAIN, BATCH, overlaps=True)
    assert [layer.cost for layer in counted] == [
        # Nothing before it learns, and nothing in it: it has no backward pass.
        counted_cost(operations=2 * 5 * 6 * 6, parameters=6 * 6 + 6, elements=5 * 6),
        counted_cost(operations=2 * (2 * 5 * 6 * 8), parameters=6 * 8, elements=5 * 8),
        counted_cost(operations=0, parameters=0, elements=2 * 5 * 8),
        counted_cost(operations=3 * (2 * 5 * 8 * 3), parameters=8 * 3 + 3, elements=5 * 3),
    ]
    assert [layer.cost for layer in measure_layers(Layered(), 3, PLAIN, BATCH)] == [0, 0, 0, 0]


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)[0]
        return found


class Sequences(Layered):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {
            "in": lambda: nn.Linear(6, 6),
            "attention": Attention,
            "recurrent": Recurrent,
            "out": lambda: nn.Linear(6, 3),
        }

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).square().mean()


def test_attention_and_recurrent_layers_are_counted_on_a_cpu() -> None:
    rows, length, width = 4, 7, 6
    batch = Microbatch({"x": torch.randn(rows, length, width)}, rows)
    _, attention, recurrent, _ = measure_layers(Sequences(), 3, PLAIN, batch, overlaps=True)
    values = rows * length * width
    # Two products forward; backward four, and one of them again.
    assert attention.cost == counted_cost(7 * 2 * values * length, 0, values)
    weights = 2 * 4 * width * width
    # The first hidden state needs no gradient.
    operations = 3 * 2 * rows * length * weights - 2 * rows * weights // 2
    assert recurrent.cost == counted_cost(operations, weights + 2 * 4 * width, values)


class Sleepy(Plain):
    """A model whose first layer is slow in one process, and the last one in another."""

    def __init__(self, first_s: float, last_s: float) -> None:
        self._seconds = first_s, last_s

    def model(self) -> nn.Module:
        class Sleeps(nn.Linear):
            def __init__(self, inputs: int, outputs: int, seconds: float) -> None:
                super().__init__(inputs, outputs)
                self._s = seconds

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                time.sleep(self._s)
                return super().forward(x)

        first_s, last_s = self._seconds
        return nn.Sequential(
            Sleeps(6, 8, first_s), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), Sleeps(8, 3, last_s)
        )


def test_partitions_that_change_results_do_not_depend_on_times() -> None:
    def partition(schedule: Schedule, **seconds: float) -> tuple[Chunks, ...] | None:
        return partition_layers(
            measure_layers(Sleepy(**seconds), 3, PLAIN, BATCH, schedule == "pipedream"), schedule, 2
        )

    early, late = {"first_s": 0.02, "last_s": 0.0}, {"first_s": 0.0, "last_s": 0.02}
    assert partition("1f1b", **early) != partition("1f1b", **late)
    assert partition("pipedream", **early) == partition("pipedream", **late) == ((("0", "1", "2"),), (("3", "4", "5"),))


def test_a_plain_sequence_has_its_modules_as_layers() -> None:
    assert [layer.name for layer in measure_layers(Plain(), 3, PLAIN, BATCH)] == ["0", "1", "2"]


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
        len(measure_layers(Running(), 3, PLAIN, BATCH))
        == len(measure_layers(Masked(), 3, PLAIN, BATCH, overlaps=True))
        == 4
    )
    with pytest.raises(TaskError, match=r"the buffer '1\.running_mean' changes in a forward pass(.|\n)*LayerNorm"):
        measure_layers(Running(), 3, PLAIN, BATCH, overlaps=True)
    with pytest.raises(TaskError, match="'head.inner.weight' and 'wide.weight' are tied".replace(".", r"\.")):
        measure_layers(Tied(), 3, PLAIN, BATCH, overlaps=True)
