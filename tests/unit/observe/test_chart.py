"""The picture of a run: small however long it is, and true."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from raytrain_plus.observe.chart import ROOM, Chart
from tests.unit.observe.feed import Event, evaluated, event, step, view


def chart(*events: Event, total: int = 100) -> Chart:
    made = Chart("run <&> é", total)
    for one in events:
        made.add(one)
    return made


def words(made: Chart) -> str:
    """All that it says, tooltips too; a document that is not well-formed is none."""
    return "\n".join(ET.fromstring(made.svg()).itertext())


def at(time: float, one: Event) -> Event:
    return {**one, "time": time}


LOST = event("worker_lost", worker="worker-1", pid=1, cause="its process <was> killed\x1b & gone")


@pytest.mark.parametrize(
    "events",
    [
        (),
        (view(1),),
        (view(1, 1), step(0)),
        (view(1), step(0, loss="nan"), step(1, loss="inf"), step(2)),
        (view(1), step(0, loss=2.0), step(1, loss=2.0)),
        (evaluated(-1, loss=3.0), evaluated(9, accuracy=0.5), view(1)),
        (view(1, 1), step(0), LOST, view(1)),
    ],
)
def test_it_is_a_document_whatever_has_happened(events: tuple[Event, ...]) -> None:
    assert "run <&> é" in words(chart(*events))


def test_it_says_how_far_the_run_is() -> None:
    assert "step 0 of 100, 0 %" in words(chart(view(1)))
    assert "step 40 of 100, 40 %" in words(chart(view(1), *map(step, range(40))))
    # Down: it is whole when the last step is made.
    assert "step 999 of 1,000, 99 %" in words(chart(view(1), step(998), total=1000))


def test_a_long_run_has_no_larger_picture_and_its_newest_step_is_exact() -> None:
    long = chart(view(1), *(step(n, loss=1 + 1 / (n + 1), time=n / 10) for n in range(20_000)), total=20_000)
    assert len(long.svg()) < 40_000
    assert f"after step 20,000: loss {1 + 1 / 20_000:.4f}".replace(",", "") in words(long).replace(",", "")
    points = [len(path.split("L")) for path in re.findall(r'd="M([^"]*)"', long.svg())]
    assert ROOM / 2 < max(points) <= 2 * ROOM


def test_incidents_are_marked_and_told() -> None:
    lost = chart(
        view(1, 1),
        at(1, step(0)),
        at(2, LOST),
        at(2.5, event("rescaled", **{"from": 2, "to": 1})),
        at(2.5, view(2)),
        at(2.6, event("recovered", stall_s=0.6)),
        at(9, event("drain_notice", node="abcdef0123456789")),
        at(20, event("rescaled", **{"from": 1, "to": 3})),
        at(20, view(1, 1, 1)),
    )
    told = words(lost)
    assert "worker-1 was lost: its process <was> killed  & gone" in told
    assert "recovered in 0.60 s" in told
    assert "node abcdef012345 will leave" in told
    assert "1 workers before, 3 now" in told
    assert "2 workers before" not in told
    assert [line for line in ("1 loss", "1 drain", "1 rescale") if line in told.splitlines()] == [
        "1 loss",
        "1 drain",
        "1 rescale",
    ]


def test_many_incidents_are_counted() -> None:
    made = chart(view(1, 1), *(at(1 + n / 1000, event("drain_notice", node=f"node-{n}")) for n in range(1000)))
    assert "1,000 drains" in words(made)
    assert "more" in words(made)
    assert len(made.svg()) < 40_000


def test_going_back_to_a_checkpoint_forgets_what_is_void() -> None:
    back = event("resumed", step=19, checkpoint="00000020-0001")
    made = chart(view(1), *(step(n, loss=5.0) for n in range(60)), at(5, back))
    assert "step 20 of 100, 20 %" in words(made)
    assert "1 return to a checkpoint" in words(made).splitlines()
