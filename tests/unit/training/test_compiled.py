"""Compiled layers: nearly the values of eager ones, the same bits whatever is recomputed, and code that lasts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import nn

from examples.byte_gpt import CONTEXT, ByteGPT
from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job.task_loader import build_task
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.task import RunFacts
from raytrain_plus.torch_compat import compiled_graphs, graph_breaks
from raytrain_plus.training.model.compiled import SHAPES, compile_layers
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.model.recompute import recompute_layers
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique
from raytrain_plus.trial.mistakes import advice_for, breaks_in_words
from tests.support.stages import alone, one_computes_at_a_time, together
from tests.unit.training.group import context

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # torch's compiler does what torch itself warns of.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
__all__ = ["one_computes_at_a_time"]
CPU = torch.device("cpu")
ROWS = 4


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Forget what earlier tests compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def gpt() -> Task:
    arguments = {"width": 64, "depth": 3, "heads": 2, "dropout": 0.0}
    return build_task(ByteGPT, arguments, RunFacts(total_steps=10, batch_size=2 * ROWS))


def batches(step: int) -> dict[int, list[Microbatch]]:
    draw = torch.Generator().manual_seed(step)
    return {
        shard: [
            Microbatch({"bytes": torch.randint(0, 256, (ROWS, CONTEXT + 1), dtype=torch.uint8, generator=draw)}, ROWS)
        ]
        for shard in range(2)
    }


def steps_of(task: Task, technique: Technique) -> SynchronousSteps:
    built = [build_model(task, 3, CPU)]
    return whole_steps(TrainState(task, built, Summing(2), seed=3, technique=replace(technique, clip_norm=1.0)))


def test_compiled_layers_train_as_eager_ones_and_their_code_lasts() -> None:
    eager, one = steps_of(gpt(), Technique()), steps_of(gpt(), Technique(compiled=True))
    before = compiled_graphs()
    for step in range(3):
        expected, found = (made.run(step, batches(step), context(SoloWorld())) for made in (eager, one))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    # Embedding and head, and one for all blocks.
    assert compiled_graphs() - before == 3
    assert not graph_breaks()
    # After a loss, a worker takes a state; another one builds its layers anew.
    one.state.adopt(one.state.snapshot())
    one.run(3, batches(3), context(SoloWorld()))
    other = steps_of(gpt(), Technique(compiled=True))
    other.state.adopt(one.state.snapshot())
    assert one.run(4, batches(4), context(SoloWorld())) == other.run(4, batches(4), context(SoloWorld()))
    assert compiled_graphs() - before == 3


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_stages_that_compute_layers_again_have_the_bits_of_one_worker(recompute: Any) -> None:
    applied, state = alone(exact=True, technique=Technique(compiled=True))
    technique = Technique(compiled=True, recompute=recompute)
    for found, own in together(Shape(1, 2), "1f1b", exact=True, technique=technique):
        assert found == applied
        assert [key for key, value in own.items() if not torch.equal(state[key], value)] == []


class Broken(nn.Module):
    """Prints in its forward pass, which no compiler can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        print("here", end="")
        return found.tanh()


class Prints(Task):
    def layers(self) -> Any:
        return {"broken": Broken}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).square().mean()


def rows(count: int) -> dict[int, list[Microbatch]]:
    return {shard: [Microbatch({"x": torch.randn(count, 3)}, count)] for shard in range(2)}


def test_what_is_not_compiled_is_named() -> None:
    steps_of(Prints(), Technique(compiled=True)).run(0, rows(4), context(SoloWorld()))
    assert "print" in breaks_in_words(graph_breaks())


class Varies(Task):
    def layers(self) -> Any:
        return {"only": lambda: nn.Linear(3, 1)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).square().mean()


def test_too_many_shapes_are_an_error_with_advice() -> None:
    with torch._dynamo.config.patch(recompile_limit=8):
        _many_shapes()


def _many_shapes() -> None:
    one = steps_of(Varies(), Technique(compiled=True))

    def run() -> None:
        for count in range(2, SHAPES + 20):
            one.run(count, rows(count), context(SoloWorld()))

    with pytest.raises(Exception, match="recompile") as caught:
        run()
    assert "compile to false" in advice_for(type(caught.value).__name__, str(caught.value), {}).remedy


def test_shapes_that_vary_are_compiled_once() -> None:
    before = compiled_graphs()
    one = steps_of(Varies(), Technique(compiled=True, varying=True))
    for count in range(2, 30):
        one.run(count, rows(count), context(SoloWorld()))
    assert compiled_graphs() - before <= 2


class InPlace(nn.Module):
    """Writes into the results of its own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.cut(self.first(x))).add_(x))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_operations_in_place_have_the_right_gradients(recompute: Any) -> None:
    def gradients(compiled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layers = {"only": InPlace()}
        if compiled:
            compile_layers(layers, recompute, varying=False)
            recompute_layers(layers, recompute, compiled=True)
        x = torch.randn(4, 8, requires_grad=True)
        layers["only"](x).sum().backward()
        assert x.grad is not None
        return torch.cat([x.grad.flatten(), *(value.grad.flatten() for value in layers["only"].parameters())])

    assert torch.allclose(gradients(compiled=True), gradients(compiled=False), atol=1e-6)
