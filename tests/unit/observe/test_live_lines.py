"""The lines of the live view in a terminal, from hand-written events."""

import doctest
from typing import Any

import pytest

from raytrain_plus.observe.run_progress import RunProgress
from raytrain_plus.observe.views import live_lines as module
from raytrain_plus.observe.views.live_lines import live_lines
from tests.unit.observe.feed import evaluated, event, experts, step, view

Event = dict[str, Any]
LOST = event("worker_lost", worker="worker-1", pid=1, node="n", cause="its process was killed")
RECOVERED = event(
    "recovered", cause="x", stall_s=0.312, steps_lost=0, steps_recomputed=0, kept=["a"], replaced=[], phases={}
)


def members(*names: str, spares: int = 0) -> Event:
    """Return a view of these workers."""
    formed = view(*[6] * len(names))
    named = [{**member, "worker": name} for member, name in zip(formed["members"], names, strict=True)]
    return {**formed, "members": named, "spares": ["s"] * spares}


def lines(*events: Event, width: int = 100) -> list[str]:
    progress = RunProgress(total=2000)
    for one in events:
        progress.add(one)
    return live_lines(progress, width)


def boxes(*events: Event) -> str:
    return next(line for line in lines(*events) if line.startswith("["))


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_all_that_is_known_is_shown() -> None:
    of_a_step = {**step(1), "epoch": 2, "lr": 0.00312, "metrics": {"accuracy": 0.5}}
    assert lines() == ["step 0 of 2,000  starting workers"]
    assert lines(view(6, 6), evaluated(-1, loss=5.5), step(0), of_a_step) == [
        "step 2 of 2,000  epoch 3  16:39 left",
        "loss 1.2500  lr 0.00312  accuracy 0.5000  96 samples/s",
        "held out, untrained: loss 5.5000",
        "[w0][w1]",
    ]


def test_the_newest_loads_of_all_layers_have_a_line() -> None:
    told = [experts(0, a=[5, 1], b=[3, 1]), experts(1, b=[1, 1]), experts(1, a=[2, 3])]
    assert lines(view(6), *told[:1])[-2] == "experts: MaxVio 0.67 at most (a), none dropped"
    assert lines(view(6), *told)[-2] == "experts: MaxVio 0.20 at most (a), none dropped"


def test_boxes_change_when_workers_are_lost_and_join() -> None:
    three = members("worker-0", "worker-1", "worker-2")
    assert boxes(three, LOST) == "[w0][··][w2]"
    two = members("worker-0", "worker-2")
    fewer = event("rescaled", **{"from": 3, "to": 2})
    assert boxes(three, LOST, fewer, two, RECOVERED) == "[w0][··][w2]", "until a replacement joins"
    assert boxes(three, LOST, two, members("worker-0", "worker-2", "worker-3")) == "[w0][w3][w2]"
    assert boxes(three, two) == "[w0][w2]", "a planned departure leaves no gap"
    assert boxes(three, LOST, fewer, two, RECOVERED, fewer) == "[w0][w2]", "nobody waits for a replacement"
    assert boxes(members("worker-0", spares=1)) == "[w0] and 1 spare"


def test_the_last_incident_is_told_in_words() -> None:
    told = [view(6, 6), LOST]
    assert lines(*told)[-1] == "last incident: worker-1 lost: its process was killed"
    assert "waiting for the recovery from a lost worker" in lines(*told)[0]
    after = "last incident: worker-1 lost: its process was killed; back after 0.31 s, no step lost"
    assert lines(*told, RECOVERED)[-1] == after
    costly = {**RECOVERED, "steps_lost": 2, "steps_recomputed": 1}
    assert lines(*told, costly)[-1].endswith("; back after 0.31 s, 2 steps lost, 1 recomputed")
    assert lines(*told, RECOVERED, RECOVERED)[-1] == "last incident: x; back after 0.31 s, no step lost", (
        "a broken world"
    )
    again = {**LOST, "worker": "worker-0", "cause": "its node is gone"}
    assert lines(*told, RECOVERED, again)[-1] == "last incident: worker-0 lost: its node is gone"


@pytest.mark.parametrize("width", [1, 10, 20, 40])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    many = members(*(f"worker-{i}" for i in range(16)), spares=2)
    shown = lines(many, LOST, RECOVERED, evaluated(0, loss=1.0), step(0), width=width)
    assert max(map(len, shown)) <= width
    assert len(shown) == 5
    if width == 40:
        assert "15 workers and 2 spares, 1 missing" in shown
