"""The best plans are found: those of computing every choice, with a reason, and fast."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from raytrain_plus import Workers
from raytrain_plus.parallel.pipeline.memory import Misfit
from raytrain_plus.parallel.pipeline.schedule import orders
from raytrain_plus.planner.layer_profile import LinkSpeed
from raytrain_plus.planner.plan_table import NoPlan, PlanTable, SizePlan
from raytrain_plus.planner.search import USABLE, PlanSearch, plan_sizes
from tests.unit.planner.profiles import MB, job, layer, model


def brute_force(search: PlanSearch, workers: int, room: float) -> list[Any]:
    found = []
    for choice in search.choices(1, workers):
        cost = search.costs.of(choice, USABLE * room)
        if not isinstance(cost, Misfit):
            found.append((search.order(choice, cost), choice))
    return [choice for _, choice in sorted(found, key=lambda one: one[0])[:2]]


@given(
    costs=some.lists(
        some.tuples(some.floats(1e-4, 1e-2), some.integers(0, 5 * MB), some.floats(0, 2e7)), min_size=1, max_size=5
    ),
    shards=some.sampled_from([1, 2, 4, 6]),
    microbatches=some.sampled_from([1, 2, 4]),
    tensor=some.sampled_from([1, 2]),
    gpus=some.sampled_from([0, 1]),
    holders=some.sampled_from([1, 2]),
    link=some.tuples(some.floats(1e-6, 1e-3), some.floats(1e8, 1e11)),
    room=some.floats(1e6, 1e9),
    cores=some.sampled_from([1.0, 2.0, 16.0]),
    update=some.floats(0, 1e-2),
)
@settings(max_examples=60, deadline=None)
def test_the_search_finds_what_computing_all_choices_finds(
    costs: Any,
    shards: int,
    microbatches: int,
    tensor: int,
    gpus: int,
    holders: int,
    link: Any,
    room: float,
    cores: float,
    update: float,
) -> None:
    layers = [layer(f"l{number}", *one, update_s=update) for number, one in enumerate(costs)]
    profile = model(layers, link=LinkSpeed(*link), cores=cores, on_one=4)
    asked = job(
        48,
        shards,
        parallel={"microbatches": microbatches, "tensor": tensor, "holders": holders},
        workers=Workers(gpus=gpus),
    )
    search = PlanSearch(asked, profile, lambda workers: room)
    for workers in (1, 2, 3, 5, 8):
        assert [choice for _, choice, _ in search.best(workers)] == brute_force(search, workers, room)


def test_sixteen_sizes_take_less_than_a_second() -> None:
    profile = model([layer(f"l{number}", 1e-3, 100_000, 1e6) for number in range(26)])
    asked = job(192, 48, parallel={"microbatches": 4})
    # Torch's schedules are loaded once.
    orders("interleaved", 2, 4)
    start = time.process_time()
    table = plan_sizes(asked, profile, range(1, 17), lambda workers: 1e9)
    assert time.process_time() - start < 1.0
    assert [row.workers for row in table.rows] == list(range(1, 17))


def plan(table: PlanTable, workers: int) -> SizePlan:
    found = table.at(workers)
    assert isinstance(found, SizePlan)
    return found


def test_a_small_model_is_replicated() -> None:
    profile = model([layer(f"l{number}", 1e-3, 1000, 1e4) for number in range(4)])
    table = plan_sizes(job(), profile, (1, 2, 5, 12, 20), lambda workers: 1e9)
    assert [plan(table, size).choice.shape.sizes for size in (1, 2, 12)] == [(1, 1, 1), (2, 1, 1), (12, 1, 1)]
    assert plan(table, 5).choice.shape.replicas in (4, 5)
    assert "data.shards = 12" in plan(table, 20).reason


def test_more_workers_are_left_out_where_sums_cost_more_than_passes() -> None:
    profile = model([layer("l", 1e-5, 10 * MB)], link=LinkSpeed(1e-3, 1e8))
    found = plan(plan_sizes(job(), profile, (4,), lambda workers: 1e9), 4)
    assert found.choice.shape.size == 1
    assert found.reason == "more than 1 worker would make no step faster"


def test_a_large_model_is_divided_and_a_larger_one_says_what_is_missing() -> None:
    # 16 bytes a value: 64 MB a layer, 512 MB in all.
    profile = model([layer(f"l{number}", 1e-2, 4 * MB, 1e6) for number in range(8)])
    table = plan_sizes(job(parallel={"microbatches": 4}), profile, (1, 2, 4, 8), lambda workers: 400 * MB)
    small = table.at(1)
    assert isinstance(small, NoPlan)
    assert "a worker needs" in small.missing
    assert "it fits on 2 workers" in small.missing or "it fits on 4 workers" in small.missing
    found = plan(table, 8)
    assert found.choice.shape.stages > 1 or found.choice.settings.sharded != "none"
    assert "a worker would need" in found.reason
    assert found.cost.memory.total <= USABLE * 400 * MB


def test_a_table_is_looked_up_by_size() -> None:
    profile = model([layer("l", 1e-3, 1000)])
    table = plan_sizes(job(), profile, (4, 2), lambda workers: 1e9)
    assert [table.at(workers).workers for workers in (2, 3, 4, 99)] == [2, 2, 4, 4]
    with pytest.raises(KeyError):
        table.at(1)
