"""What a loss returns beside the loss: metrics that travel with the header, the same bits on any number of workers."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation, Work
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.training.exchange import header, step_metrics
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.header import Flags, ShardReport
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from tests.support import exact_steps, overlapping, stages
from tests.unit.training.group import Group, context

CPU = torch.device("cpu")


class Measured(exact_steps.Small):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        x = batch["x"]
        return {**super().loss(model, batch), "metrics": {"mean": x.mean(), "share": (x > 0).float().mean(), "one": 1}}


def run(one: SynchronousSteps, step: int, shards: int = exact_steps.SHARDS, world: Any = None) -> Applied:
    return one.run(step, exact_steps.batches(step, range(shards)), context(world or SoloWorld()))


def test_metrics_are_weighted_means_and_change_no_state() -> None:
    bare, measured = exact_steps.steps_of(), exact_steps.steps_of(Measured())
    for step in range(exact_steps.STEPS):
        plain, told = run(bare, step), run(measured, step)
        assert (told.loss, told.notes, plain.metrics) == (plain.loss, plain.notes, {})
        microbatches = [one for of in exact_steps.batches(step, range(exact_steps.SHARDS)).values() for one in of]
        weights = [
            float(1 + (one.batch["y"] + 1).remainder(3).sum()) * float(one.batch["x"].abs().max())
            for one in microbatches
        ]
        mean = sum(w * float(one.batch["x"].mean()) for w, one in zip(weights, microbatches, strict=True))
        assert told.metrics["mean"] == pytest.approx(mean / sum(weights), rel=1e-12)
        assert told.metrics["one"] == pytest.approx(1.0)
    assert exact_steps.sha(measured.state) == exact_steps.sha(bare.state)


def test_metrics_have_the_same_bits_with_any_workers_and_deaths() -> None:
    one = exact_steps.steps_of(Measured())
    expected = [run(one, step).metrics for step in range(exact_steps.STEPS)]
    group = Group(lambda: exact_steps.steps_of(Measured()), exact_steps.batches, exact_steps.SHARDS)
    group.train(exact_steps.STEPS, random.Random(3))
    assert [group.metrics[step] for step in range(exact_steps.STEPS)] == expected
    assert group.deaths


class Counting(SoloWorld):
    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        self.sent.append((name, tensor.numel()))
        return super().reduce(tensor, name, operation)


class Line(Task):
    """Returns what it is given beside the loss."""

    def __init__(self, *given: Any, dtype: torch.dtype = torch.float32) -> None:
        self.given, self.dtype = list(given), dtype

    def model(self) -> nn.Module:
        return nn.Linear(2, 1).to(self.dtype)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        loss = model(batch.to(self.dtype)).float().square().mean()
        return {"loss": loss, "metrics": self.given.pop(0)} if self.given else loss


def steps_of(task: Task) -> SynchronousSteps:
    return whole_steps(TrainState(task, [build_model(task, 0, CPU)], Summing(2), seed=0))


def step_of(one: SynchronousSteps, step: int, world: Any = None, microbatches: int = 1) -> Applied:
    given = {shard: [Microbatch(torch.ones(4, 2) + shard, 4)] * microbatches for shard in range(2)}
    return one.run(step, given, context(world or SoloWorld()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_only_a_step_with_more_metrics_than_before_sums_them_separately(dtype: torch.dtype) -> None:
    world, bare = Counting(), Counting()
    metrics = [{"a": 1.0, "b": -0.0}] * 2 + [{"b": 4.0, "a": 3.0}] * 2 + [{}] * 2 + [{"z": 2.5}] * 2
    one, other = steps_of(Line(*metrics, dtype=dtype)), steps_of(Line(dtype=dtype))
    told, sent = [], []
    for step in range(4):
        told.append(step_of(one, step, world).metrics)
        step_of(other, step, bare)
        sent.append((world.sent, bare.sent))
        world.sent, bare.sent = [], []
    assert told == [{"a": 1.0, "b": 0.0}, {"a": 3.0, "b": 4.0}, {}, {"z": 2.5}]
    first, second = sent[0], sent[1]
    assert [one for one in first[0] if one not in first[1]] == [("metrics", 4)]
    assert [name for name, _ in second[0]] == [name for name, _ in second[1]]
    assert sent[2][0] == sent[3][0] == second[0]
    assert {id(view) for _, view in one.state.parts[0].gradients._views} == {
        id(value.grad) for value in one.state.module.parameters()
    }


def test_a_worker_takes_the_room_for_metrics_with_the_state() -> None:
    one = steps_of(Line(*[{"a": 1.0}] * 6))
    start = one.state.snapshot()
    step_of(one, 0)
    newcomer, world = steps_of(Line(*[{"a": 2.0}] * 4)), Counting()
    newcomer.state.adopt(one.state.snapshot())
    step_of(newcomer, 1, world)
    assert "metrics" not in [name for name, _ in world.sent]
    assert one.state.counts == {"skipped": 0, "metrics": 1}
    one.state.adopt(start)
    assert one.state.counts == {"skipped": 0}
    assert step_of(one, 0, world).metrics == {"a": 1.0}


def test_nan_in_a_metric_is_reported_and_refuses_no_step() -> None:
    one = steps_of(Line(*[{"a": math.nan, "b": math.inf}] * 4))
    for step in range(2):
        told = step_of(one, step)
        assert (math.isnan(told.metrics["a"]), told.metrics["b"], told.skipped) == (True, math.inf, False)


def test_a_metric_of_nothing_does_not_count() -> None:
    report = ShardReport(0).plus(4, 0, 0.0, 0.0, {"a": math.nan}).plus(4, 0, 2.0, 1.0, {"a": 3.0})
    assert report.metrics == {"a": 6.0}


def test_other_names_are_named_with_step_and_shard() -> None:
    with pytest.raises(TrainingError, match=r"other names for shard 1 in step 0 than for shard 0"):
        step_of(steps_of(Line({"a": 1.0}, {"b": 1.0})), 0)
    with pytest.raises(TrainingError, match=r"other names for shard 0 in step 0 than before"):
        step_of(steps_of(Line({"a": 1.0}, {"b": 1.0}, {"a": 1.0}, {"a": 1.0})), 0, microbatches=2)


def test_the_note_for_the_ledger_is_the_same_with_metrics() -> None:
    plain = {shard: ShardReport(7, 4, 2**64 - 1, 4.0, 2.0) for shard in range(2)}
    measured = {shard: report._replace(metrics={"a": 1.0, "b": 2.0}) for shard, report in plain.items()}
    one, other = (header.decode(header.encode(reports, 2, Flags(pause=True))) for reports in (plain, measured))
    assert (one.notes, one.rows, one.flags) == (other.notes, other.rows, other.flags)
    assert one.signatures == {0: 0, 1: 0}
    assert other.signatures == dict.fromkeys(range(2), step_metrics.signature(["b", "a"]))


class Deep(stages.Deep):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {**super().loss(model, batch), "metrics": {"mean": batch["x"].mean(), "largest": batch["x"].max()}}


one_computes_at_a_time = stages.one_computes_at_a_time


def test_stages_report_the_metrics_of_one_worker() -> None:
    def trained(one: SynchronousSteps, world: Any, hosted: tuple[int, ...], data: bool) -> list[Any]:
        return [one.run(step, stages.batches(step, hosted, data), context(world)).metrics for step in range(3)]

    made = Deep()
    one = whole_steps(stages.state_of(made, [build_model(made, stages.SEED, CPU)], exact=True))
    expected = trained(one, SoloWorld(), tuple(range(stages.SHARDS)), True)
    assert set(expected[0]) == {"mean", "largest"}
    assert stages.together(Shape(2, 2), "1f1b", exact=True, task=Deep, act=trained) == [expected] * 4


class Smooth(overlapping.Smooth):
    def loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {**super().loss(model, batch), "metrics": {"mean": batch["x"].mean()}}


def test_overlapping_steps_report_their_metrics() -> None:
    windows = [range(3), range(3, 5)]
    told = overlapping.together(Shape(2, 2), windows, task=Smooth)
    plain = overlapping.together(Shape(2, 2), windows)
    assert [one.state.counts for _, _, one in told] == [{"skipped": 0, "metrics": 1}] * 4
    for applied, weights, _ in told[1:]:
        assert [one.metrics for one in applied] == [one.metrics for one in told[0][0]]
        assert all(list(one.metrics) == ["mean"] for one in applied)
        assert weights.keys() <= {name for _, held, _ in plain for name in held}
    for (_, mine, _), (_, other, _) in zip(told, plain, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)


class Output(OrderedDict[str, Any]):
    """Like a Transformers `ModelOutput`."""


SCALAR = torch.ones(1, requires_grad=True).sum()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((SCALAR, 0.5), "a tuple of 2; expected the mean loss"),
        ([SCALAR], "an object of type list"),
        (None, "None; expected the mean loss"),
        (1.5, "an object of type float"),
        (Output(loss=SCALAR, logits=torch.ones(2)), "the keys 'logits'; expected"),
        ({"metrics": {}}, "a mapping without the key 'loss'"),
        (torch.ones(3, requires_grad=True), r"a loss of shape \(3,\)"),
        (torch.tensor(3), "a loss of dtype torch.int64"),
        (torch.tensor(True), "a loss of dtype torch.bool"),
        ({"loss": SCALAR, "weight": "4"}, "a weight that is an object of type str; expected one number"),
        ({"loss": SCALAR, "weight": torch.ones(2)}, r"a weight that is a torch.float32 of shape \(2,\)"),
        ({"loss": SCALAR, "metrics": [1.0]}, "an object of type list as metrics"),
        ({"loss": SCALAR, "metrics": {1: 1.0}}, "a metric named 1"),
        ({"loss": SCALAR, "metrics": {"loss": 1.0}}, "a metric named 'loss'"),
        ({"loss": SCALAR, "metrics": {"a": torch.ones(2)}}, "the metric 'a', which is a torch.float32"),
        ({"loss": SCALAR, "metrics": {str(n): 1.0 for n in range(65)}}, "65 metrics; at most 64"),
    ],
)
def test_what_a_loss_may_not_return_is_named(given: Any, words: str) -> None:
    class Given(Line):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return given

    with pytest.raises(TrainingError, match=f"Given.loss returned {words}"):
        step_of(steps_of(Given()), 0)


def test_a_full_mapping_is_accepted() -> None:
    names = [str(number) for number in range(64)]
    one = steps_of(Line(*[dict.fromkeys(names, torch.tensor(2))] * 4))
    assert [step_of(one, step).metrics for step in range(2)] == [dict.fromkeys(sorted(names), 2.0)] * 2
