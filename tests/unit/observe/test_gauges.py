"""The metrics that a run exports, and the dashboard's queries for them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest

from raytrain_plus.controller.record.sums.totals import Totals
from raytrain_plus.observe.gauges import OF_GPU, OF_RUN, OF_WORKER, Gauges, GaugeValues
from raytrain_plus.observe.gpu_use import GpuUse
from raytrain_plus.training.exchange.step_records import StepRecord
from tests.unit.observe.dashboard import dashboard, queries
from tests.unit.observe.feed import event, step, view


@dataclass
class Run:
    """A run's gauges and totals, updated as the journal updates them."""

    totals: Totals
    gauges: Gauges

    def step(self, number: int, time: float, *, loss: float = 1.25, skipped: bool = False) -> None:
        self.totals.add(
            StepRecord(
                step=number,
                rows=48,
                loss=loss,
                grad_norm=0.25,
                skipped=skipped,
                seconds=0.5,
                waited_s=0.1,
                time=time,
            )
        )
        self.gauges.add(step(number, samples=48, seconds=0.5, loss=loss, time=time))

    def of_run(self, checkpoint: float | None = None) -> dict[str, float]:
        return {
            name.removeprefix("raytrain_"): value
            for (name, tags), value in self.gauges.values(checkpoint).items()
            if not tags
        }

    def of_workers(self) -> GaugeValues:
        return {key: value for key, value in self.gauges.values(None).items() if key[1]}


@pytest.fixture
def run() -> Run:
    totals = Totals()
    return Run(totals, Gauges(totals))


def lost(worker: str) -> dict[str, object]:
    return event("worker_lost", worker=worker, pid=1, node="n", cause="killed")


def test_a_new_run_exports_only_known_values(run: Run) -> None:
    run.gauges.add(event("waiting", **{"for": "2 more workers"}))
    assert run.of_run() == {
        "steps": 0,
        "steps_skipped": 0,
        "samples_per_second": 0,
        "generation": 0,
        "workers": 0,
        "spares": 0,
        "waiting": 1,
        "recoveries": 0,
        "stall_seconds": 0,
        "goodput": 1,
        "checkpoints_failed": 0,
    }


def test_figures_follow_the_run(run: Run) -> None:
    run.gauges.add({**view(4, 4), "generation": 3, "spares": ["worker-9"]})
    for number in range(4):
        run.step(number, 100.0 + number, loss=2.0 - number, skipped=number == 2)
    run.gauges.add(event("checkpoint_failed", step=1, error="the disk is full"))
    run.gauges.add({**event("checkpoint_saved", step=3, seconds=1.5, stall_s=0.25), "generation": 3})
    assert run.of_run(checkpoint=1e9) == {
        "steps": 4,
        "steps_skipped": 1,
        "samples_per_second": 96,
        "loss": -1.0,
        "grad_norm": 0.25,
        "generation": 3,
        "workers": 2,
        "spares": 1,
        "waiting": 0,
        "recoveries": 0,
        "stall_seconds": 0,
        "goodput": 1,
        "checkpoint_timestamp_seconds": 1e9,
        "checkpoint_seconds": 1.5,
        "checkpoint_stall_seconds": 0.25,
        "checkpoints_failed": 1,
    }


def test_during_a_recovery_the_speed_is_zero_and_goodput_matches_the_summary(run: Run) -> None:
    run.gauges.add(view(4, 4))
    for number in range(3):
        run.step(number, float(number))
    run.gauges.add(lost("worker-1"))
    during = run.of_run()
    assert (during["waiting"], during["samples_per_second"]) == (1, 0)
    run.gauges.add(view(8))
    run.step(3, 8.0)
    run.totals.recovered(6.0)
    after = run.of_run()
    assert (after["waiting"], after["workers"], after["recoveries"], after["stall_seconds"]) == (0, 1, 1, 6)
    result = run.totals.result(
        name="run",
        status="finished",
        path="",
        metrics={},
        state_sha256=None,
        error=None,
        show=None,
        began=0,
        bubble=None,
        ended=0.0,
    )
    assert after["goodput"] == result.goodput == 0.25


def test_a_resumed_run_has_fewer_steps(run: Run) -> None:
    run.gauges.add(view(4, 4))
    for number in range(3):
        run.step(number, float(number))
    run.totals.back_to(0, 48, made=2)
    assert run.of_run()["steps"] == 1


def told(seconds: float, waited_s: float, reduce_s: float) -> StepRecord:
    return StepRecord(step=0, rows=48, loss=1.0, seconds=seconds, waited_s=waited_s, reduce_s=reduce_s, time=0.0)


def test_each_members_time_adds_up_and_ends_with_it(run: Run) -> None:
    run.gauges.worked("worker-0", told(1, 1, 1))
    run.gauges.add(view(4, 4))
    run.gauges.worked("worker-0", told(1.0, 0.25, 0.125))
    run.gauges.worked("worker-0", told(1.0, 0.25, 0.25))
    run.gauges.worked("worker-1", told(1.0, 0.0, 0.5))
    assert run.of_workers() == {
        ("raytrain_step_seconds", ("worker-0", "0")): 2.0,
        ("raytrain_data_wait_seconds", ("worker-0", "0")): 0.5,
        ("raytrain_reduce_seconds", ("worker-0", "0")): 0.375,
        ("raytrain_step_seconds", ("worker-1", "0")): 1.0,
        ("raytrain_data_wait_seconds", ("worker-1", "0")): 0.0,
        ("raytrain_reduce_seconds", ("worker-1", "0")): 0.5,
    }
    # The next view has only the first worker, on another stage; its sums are kept.
    alone = view(8)
    alone["members"][0]["stage"] = 1
    run.gauges.add(alone)
    assert run.of_workers() == {
        ("raytrain_step_seconds", ("worker-0", "1")): 2.0,
        ("raytrain_data_wait_seconds", ("worker-0", "1")): 0.5,
        ("raytrain_reduce_seconds", ("worker-0", "1")): 0.375,
    }


def test_a_member_with_a_gpu_has_the_newest_reading_of_what_its_driver_reports(run: Run) -> None:
    run.gauges.gpu("worker-0", GpuUse(utilisation=0.1, memory_bytes=1, power_w=1.0))
    run.gauges.add(view(4, 4))
    run.gauges.gpu("worker-1", GpuUse(utilisation=0.2, memory_bytes=1, power_w=60.0))
    run.gauges.gpu("worker-1", GpuUse(utilisation=0.9, memory_bytes=2 * 10**9, power_w=None))
    assert {key: value for key, value in run.of_workers().items() if key[0] in OF_GPU} == {
        ("raytrain_gpu_utilisation", ("worker-1", "0")): 0.9,
        ("raytrain_gpu_memory_bytes", ("worker-1", "0")): 2e9,
    }
    run.gauges.add(view(8))
    assert not {name for name, _ in run.of_workers()} & OF_GPU.keys()


def test_every_gauge_has_a_panel_and_every_query_uses_existing_gauges() -> None:
    asked = list(queries())
    gauges = {**OF_RUN, **OF_WORKER, **OF_GPU}
    assert set().union(*(metrics for _, metrics, _ in asked)) == {f"ray_{name}" for name in gauges}
    for text, metrics, labels in asked:
        for metric in metrics:
            tags = {"run"} if metric.removeprefix("ray_") in OF_RUN else {"run", "worker", "stage"}
            assert labels <= tags, text


def test_grafana_can_import_the_dashboard() -> None:
    found = dashboard()
    assert found["schemaVersion"] >= 39
    assert "id" not in found
    variables = {variable["name"]: variable["type"] for variable in found["templating"]["list"]}
    assert variables == {"datasource": "datasource", "run": "query"}
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels if panel["type"] != "row")
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for above, below in pairwise(places):
        beside = below["y"] == above["y"] and below["x"] >= above["x"] + above["w"]
        assert beside or below["y"] == above["y"] + above["h"]
