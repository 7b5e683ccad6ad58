"""The metrics of each kind of event."""

import math

from raytrain_plus.observe.trackers.event_metrics import EventMetrics
from tests.unit.observe.feed import Event, evaluated, event, experts, step, view


def told(*events: Event) -> list[tuple[str, int, float, float]]:
    figures = EventMetrics()
    found = [figure for one in events for figure in figures.of(one)]
    return [(figure.name, figure.step, figure.value, figure.time_s) for figure in found]


def test_each_kind_has_its_metrics() -> None:
    assert told(
        event("run_started", job="", versions={}, address=""),
        view(6, 6),
        evaluated(-1, loss=5.5, größe=0.25),
        step(0, samples=48, seconds=0.5, loss=5.25, time=1_700_000_000.25),
        step(70_000, samples=48, seconds=0.0, loss=4.5),
        event("worker_lost", worker="w", pid=1, node="n", cause="killed"),
        view(12),
        event("recovered", cause="w was lost", stall_s=0.5, steps_lost=0),
        evaluated(70_000, loss=1.5),
    ) == [
        ("run/workers", 0, 2.0, 0.0),
        ("evaluation/loss", 0, 5.5, 0.0),
        ("evaluation/größe", 0, 0.25, 0.0),
        ("train/loss", 0, 5.25, 1_700_000_000.25),
        ("train/samples_per_second", 0, 96.0, 1_700_000_000.25),
        ("train/loss", 70_000, 4.5, 0.0),
        ("run/workers", 70_000, 1.0, 0.0),
        ("run/stall_s", 70_000, 0.5, 0.0),
        ("evaluation/loss", 70_001, 1.5, 0.0),
    ]


def test_a_resumed_run_has_the_step_at_which_it_resumed() -> None:
    resumed = event("resumed", step=19, checkpoint="a", voided_to=25)
    assert told(resumed, view(6)) == [("run/workers", 19, 1.0, 0.0)]
    assert told(step(25, seconds=0.0), event("resumed", step=-1, checkpoint=None, voided_to=25), view(6))[1:] == [
        ("run/workers", 0, 1.0, 0.0)
    ]


def test_a_steps_metrics_are_named_after_training() -> None:
    measured = {**step(3, seconds=0.0), "metrics": {"accuracy": 0.5, "share": "nan"}}
    names = [name for name, _, _, _ in told(measured)]
    assert names == ["train/accuracy", "train/share", "train/loss"]
    assert told(measured)[0] == ("train/accuracy", 3, 0.5, told(measured)[2][3])


def test_a_learning_rate_has_one_name_for_each_group() -> None:
    one, two = ({**step(3, seconds=0.0), "lr": rate} for rate in (0.5, [0.5, 0.25]))
    assert [metric[:3] for metric in told(one)][1:] == [("train/lr", 3, 0.5)]
    assert [metric[:3] for metric in told(two)][1:] == [("train/lr/0", 3, 0.5), ("train/lr/1", 3, 0.25)]


def test_the_loads_of_few_experts_are_metrics_over_the_even_load() -> None:
    found = told(experts(7, a=[3, 1], b=[2] * 16, c=[1] * 17))
    assert found[:5] == [
        ("experts/a/max_vio", 7, 0.5, 0.0),
        ("experts/a/dropped", 7, 0.0, 0.0),
        ("experts/a/entropy", 7, 1.0, 0.0),
        ("experts/a/load/0", 7, 1.5, 0.0),
        ("experts/a/load/1", 7, 0.5, 0.0),
    ]
    assert [name for name, *_ in found[-4:]] == [
        "experts/b/load/15",
        "experts/c/max_vio",
        "experts/c/dropped",
        "experts/c/entropy",
    ]


def test_a_loss_that_is_not_finite_is_kept() -> None:
    """Events write numbers that JSON cannot express as text."""
    assert all(math.isnan(told(step(0, seconds=0.0, loss=loss))[0][2]) for loss in (math.nan, "nan"))
