"""The picture of a run with a lost worker: deterministic, well-formed, and true to the run's events."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from examples.lanes import losses, periods, svg
from examples.lost_worker import PICTURE

SVG = "{http://www.w3.org/2000/svg}"
Event = dict[str, Any]


def at(time: float, kind: str, **fields: Any) -> Event:
    return {"time": 1000.0 + time, "generation": 0, "kind": kind, **fields}


def view(time: float, *workers: str) -> Event:
    return at(time, "view_formed", members=[{"worker": worker} for worker in workers])


def step(time: float, number: int, seconds: float = 1.0, loss: float = 2.0) -> Event:
    return at(time, "step_committed", step=number, seconds=seconds, loss=loss)


EVENTS = [
    view(0, "worker-0", "worker-1"),
    step(2, 0),
    step(3, 1, loss=4.0),
    step(4, 2, seconds=1.5, loss=3.0),
    at(4.5, "worker_lost", worker="worker-1"),
    view(4.6, "worker-0"),
    step(6, 3),
    at(6, "recovered", stall_s=0.421, steps_lost=0),
    view(6.5, "worker-0", "worker-<2>"),
    step(8, 4, loss=1.0),
]


def texts(document: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(document).iter(f"{SVG}text")]


def test_steps_belong_to_the_workers_that_made_them() -> None:
    found = [(period.workers, [(step.start, step.end) for step in period.steps]) for period in periods(EVENTS)]
    # The first step is not drawn; no step begins before the one before it has ended.
    assert found == [
        (("worker-0", "worker-1"), [(0.0, 1.0), (1.0, 2.0)]),
        (("worker-0",), [(3.0, 4.0)]),
        (("worker-0", "worker-<2>"), [(5.0, 6.0)]),
    ]


def test_a_loss_is_drawn_with_what_it_cost() -> None:
    [loss] = losses(EVENTS)
    assert (loss.worker, loss.time, loss.stall_s, loss.steps_lost) == ("worker-1", 2.5, 0.421, 0)
    shown = texts(svg(EVENTS, "A run"))
    assert shown[:2] == ["A run", "worker-1 is killed: 421 ms without a step, 0 steps lost"]
    assert {"worker-0", "worker-1", "worker-<2>", "421 ms", "loss 4.0", "1.0", "6 s"} <= set(shown)
    assert shown.count("its replacement joins") == 1


def test_a_loss_that_the_run_did_not_survive_has_no_cost() -> None:
    assert losses([*EVENTS[:5]]) == []
    assert "killed (SIGKILL)" not in texts(svg(EVENTS[:5], "A run"))


def test_equal_events_give_equal_pictures() -> None:
    assert svg(EVENTS, "A run") == svg([*EVENTS], "A run")
    shifted = [{**event, "time": event["time"] + 512.0} for event in EVENTS]
    assert svg(shifted, "A run") == svg(EVENTS, "A run")


def test_the_picture_of_the_first_page_is_one_of_these() -> None:
    document = PICTURE.read_text()
    assert len(document) < 20_000
    shown = texts(document)
    assert shown[1].endswith(", 0 steps lost")
    assert {"killed (SIGKILL)", "its replacement joins", "worker-0", "worker-3"} <= set(shown)
