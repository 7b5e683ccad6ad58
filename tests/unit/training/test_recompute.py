"""Layers that are computed again give the same bits, and keep less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from examples.byte_gpt import CONTEXT, ByteGPT
from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TaskError
from raytrain_plus.job.setting_types import Recompute
from raytrain_plus.task import RunFacts
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.model.precision import FP32, Precision
from raytrain_plus.training.model.recompute import check_layers, recompute_layers
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique
from raytrain_plus.trial.footprint import kept_bytes
from raytrain_plus.trial.measure import measure_layers
from raytrain_plus.workers.states.state_source import sha256_of
from tests.support.stages import Deep
from tests.unit.training.group import context

CPU = torch.device("cpu")
SHARDS, MICROBATCHES, ROWS, STEPS = 2, 2, 4, 3
KINDS = ("selective", "full", ("drop", "act"))


def batches(step: int) -> dict[int, list[Microbatch]]:
    made: dict[int, list[Microbatch]] = {}
    for shard in range(SHARDS):
        draw = torch.Generator().manual_seed(10 * step + shard)
        for _ in range(MICROBATCHES):
            given = {
                "x": torch.randn(ROWS, 6, generator=draw),
                "y": torch.randint(0, 3, (ROWS,), generator=draw),
            }
            made.setdefault(shard, []).append(Microbatch(given, ROWS))
    return made


def trained(recompute: Recompute, precision: Precision = FP32, task: type[Task] = Deep) -> tuple[list[Applied], str]:
    made = task()
    state = TrainState(
        made,
        [build_model(made, 3, CPU)],
        Summing(SHARDS),
        seed=3,
        technique=Technique(precision, recompute, clip_norm=0.5),
    )
    steps = whole_steps(state)
    applied = [steps.run(step, batches(step), context(SoloWorld())) for step in range(STEPS)]
    return applied, sha256_of(state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", KINDS, ids=str)
def test_the_bits_are_those_without(recompute: Recompute, precision: Any) -> None:
    """The model has dropout, BatchNorm, a block with a checkpoint of its own, and a layer that reads its own buffer."""
    assert trained(recompute, Precision(precision)) == trained("none", Precision(precision))


class Counted(nn.Module):
    """Counts its forward passes."""

    def __init__(self, calls: list[str], name: str) -> None:
        super().__init__()
        self.calls, self.name = calls, name
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(self.name)
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize(
    ("recompute", "passes"),
    [
        ("none", ["a", "b"]),
        ("full", ["a", "b", "b", "a"]),
        (["b"], ["a", "b", "b"]),
        ("selective", ["a", "b", "b", "a"]),
    ],
    ids=str,
)
def test_each_layer_is_computed_once_more(recompute: Recompute, passes: list[str]) -> None:
    calls: list[str] = []
    model = nn.Sequential()
    for name in "ab":
        model.add_module(name, Counted(calls, name))
    recompute_layers(dict(model.named_children()), recompute)
    model(torch.randn(2, 6)).sum().backward()
    assert calls == passes
    with torch.no_grad():
        model(torch.randn(2, 6))
    assert calls == [*passes, "a", "b"]


class Overwrites(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0).tanh()


def test_an_input_that_was_overwritten_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Overwrites())
    recompute_layers(dict(model.named_children()), ["1"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(2, 3)).sum().backward()


def test_names_must_be_those_of_layers() -> None:
    with pytest.raises(TaskError, match="there is no layer 'block4'") as caught:
        check_layers(["block4"], ["embed", "block0", "head"])
    assert caught.value.remedy == "did you mean 'block0'?"
    with pytest.raises(TaskError, match="a model that does not declare its layers cannot compute them again"):
        check_layers("full", [])


def gpt() -> ByteGPT:
    task = ByteGPT(dropout=0.0)
    task._run = RunFacts(total_steps=10, batch_size=8)
    return task


def gpt_batch(rows: int) -> Microbatch:
    draw = torch.Generator().manual_seed(0)
    given = torch.randint(0, 256, (rows, CONTEXT + 1), dtype=torch.uint8, generator=draw)
    return Microbatch({"bytes": given}, rows)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full", ["block0", "block1"]], ids=str)
def test_the_forecast_of_activations_is_what_torch_measures(recompute: Recompute, precision: Any) -> None:
    task, batch, own = gpt(), gpt_batch(8), Precision(precision)
    layers = measure_layers(task, 0, Technique(own, recompute), batch)
    model = build_model(task, 0, CPU).module.train()
    recompute_layers(dict(model.named_children()), recompute)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        with own.autocast():
            loss = task.loss(model, batch.batch)
        found = tracker.get_tracker_snapshot("current")[CPU]
    now = {str(getattr(kind, "value", kind)): size for kind, size in found.items()}
    kept = now["Total"] - now["Parameter"]
    assert sum(layer.activations for layer in layers) == pytest.approx(kept, rel=0.1)
    assert float(loss.detach()) > 0


def test_less_is_kept() -> None:
    found = {
        kind: sum(layer.activations for layer in measure_layers(gpt(), 0, Technique(recompute=kind), gpt_batch(8)))
        for kind in ("none", "selective", "full")
    }
    assert found["full"] < 0.5 * found["selective"] < 0.4 * found["none"]


def test_what_a_pass_frees_is_not_counted() -> None:
    def forward() -> torch.Tensor:
        made: Callable[[], torch.Tensor] = lambda: torch.zeros(100)  # noqa: E731
        return made() + made()

    assert kept_bytes(forward) == 400
