"""The cost of a choice: its memory by kind, and the time of its steps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.parallel.pipeline.forecast import forecast
from raytrain_plus.parallel.pipeline.memory import Misfit
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.planner import cost
from raytrain_plus.planner.cost import ChoiceCost, CostModel
from raytrain_plus.planner.layer_profile import LinkSpeed
from raytrain_plus.planner.space import Choice, FreeSettings
from tests.unit.planner.profiles import MB, job, layer, model

PLAIN = FreeSettings("none", "none", "none", "1f1b")
LAYERS = [layer(f"l{number}", 1e-3 * (1 + number % 2), MB, 1e5) for number in range(6)]


def priced(choice: Choice, asked: Any = None, **more: Any) -> ChoiceCost:
    found = CostModel(asked or job(), model(LAYERS, **more)).of(choice, math.inf)
    assert not isinstance(found, Misfit)
    return found


def test_one_worker_makes_all_passes_one_after_the_other() -> None:
    found = priced(Choice(Shape(1), PLAIN))
    # 48 rows of 9 ms.
    assert found.time.compute == pytest.approx(48 * 9e-3)
    assert (found.time.bubble, found.time.sums) == (0, 0)
    kinds = found.memory.kinds
    assert (kinds["weights"], kinds["gradients"], kinds["optimizer"]) == (24 * MB, 24 * MB, 48 * MB)
    # One microbatch of four rows.
    assert kinds["activations"] == 4 * 6 * 10**5


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_pipeline_has_the_bubble_of_its_forecast(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MESSAGE_S", 0.0)
    asked = job(parallel={"microbatches": 2})
    choice = Choice(Shape(3, 2), FreeSettings("none", "none", "none", schedule))
    found = priced(choice, asked, link=LinkSpeed(0.0, 1e30))
    layers = [Layer(one.name, 2 * one.passes["none"].seconds.per_row, 0) for one in LAYERS]
    known = forecast(layers, schedule, 2, 8)
    slowest = max(stage.seconds for stage in known.stages)
    work = sum(stage.seconds for stage in known.stages) * 8 / 2
    assert found.time.compute == pytest.approx(8 * slowest)
    assert found.time.compute + found.time.bubble == pytest.approx(work / (1 - known.bubble), rel=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_many_microbatches_take_as_long_as_if_all_were_laid_out(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job(192, 48, parallel={"microbatches": 2})
    choice = Choice(Shape(1, 2), FreeSettings("none", "none", "none", schedule))
    short = priced(choice, asked).time.total
    monkeypatch.setattr(cost, "MOST_PASSES", 10**6)
    monkeypatch.setattr(cost, "LAID_OUT", 10**6)
    assert short == pytest.approx(priced(choice, asked).time.total, rel=0.02)
    monkeypatch.setattr(cost, "MOST_PASSES", 0)
    assert priced(choice, asked).time.total == pytest.approx(short, rel=0.05)


def test_workers_that_share_a_core_gain_nothing() -> None:
    alone = priced(Choice(Shape(1), PLAIN), on_one=8, cores=1.0)
    both = priced(Choice(Shape(2), PLAIN), on_one=8, cores=1.0)
    apart = priced(Choice(Shape(2), PLAIN), on_one=1, cores=1.0)
    assert both.time.compute == pytest.approx(alone.time.compute)
    assert apart.time.compute == pytest.approx(alone.time.compute / 2)


def test_sums_hide_behind_the_last_backward_pass() -> None:
    slow = LinkSpeed(0.0, 1e9)
    found = priced(Choice(Shape(2), PLAIN), link=slow).time.sums
    # 24 MB of gradients in 24 ms, two thirds of a microbatch of 36 ms away from nothing.
    assert found == pytest.approx(24 * MB / 1e9 * cost.BUCKET_BYTES / (24 * MB))
    crowded = priced(Choice(Shape(2), PLAIN), link=slow, cores=2.0, on_one=2).time.sums
    assert crowded == pytest.approx(24 * MB / 1e9)


def test_the_optimizer_is_divided_where_its_state_is() -> None:
    layers = [layer("l", 1e-3, MB, update_s=8e-3)]
    asked = job(parallel={"holders": 1})
    costs = CostModel(asked, model(layers))
    sharded = costs.of(Choice(Shape(4), FreeSettings("optimizer", "none", "none", "1f1b")), math.inf)
    whole = costs.of(Choice(Shape(4), PLAIN), math.inf)
    assert isinstance(sharded, ChoiceCost)
    assert isinstance(whole, ChoiceCost)
    assert (whole.time.rest, sharded.time.rest) == (pytest.approx(8e-3), pytest.approx(2e-3))
    assert sharded.memory.optimizer == whole.memory.optimizer // 4
    assert sharded.time.sums > whole.time.sums
