"""The chart of a run is well-formed SVG of bounded size, thinned, with marked incidents."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from raytrain_plus.observe.views.chart import Chart
from raytrain_plus.observe.views.thinned import ROOM
from tests.unit.observe.feed import Event, evaluated, event, step, view

SVG = "{http://www.w3.org/2000/svg}"


def drawn(chart: Chart) -> ElementTree.Element:
    root = ElementTree.fromstring(chart.svg())
    assert (root.get("width"), root.get("height")) == ("640", "312")
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def titles(root: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in root.iter(f"{SVG}title")]


def fed(*events: Event, total: int = 100, name: str = "gpt") -> Chart:
    chart = Chart(name, total)
    for one in events:
        chart.add(one)
    return chart


def at(time: float, one: Event) -> Event:
    return {**one, "time": time}


def lost(time: float, worker: str = "worker-0", cause: str = "killed") -> Event:
    return at(time, event("worker_lost", worker=worker, pid=7, node="n", cause=cause))


def recovered(time: float) -> Event:
    fields = {"cause": "killed", "stall_s": 0.31, "steps_lost": 0, "steps_recomputed": 0}
    return at(time, event("recovered", **fields, kept=[], replaced=[], phases={}))


def rescaled(time: float, before: int, now: int) -> Event:
    return at(time, event("rescaled", **{"from": before, "to": now}))


def strokes(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """Return the points of each curve."""
    return [
        [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.get("d") or "")]
        for path in root.iter(f"{SVG}path")
        if path.get("fill") == "none"
    ]


def test_a_run_without_events_has_a_chart() -> None:
    assert titles(drawn(Chart("gpt", 0))) == []
    assert texts(drawn(Chart("gpt", 100)))[:2] == ["gpt", "step 0 of 100, 0 %"]


def test_it_shows_the_progress_and_the_newest_loss() -> None:
    root = drawn(fed(view(6, 6), evaluated(-1, loss=2.5), step(0, loss=2.0), step(1, loss=1.5), evaluated(1, loss=1.6)))
    assert "step 2 of 100, 2 %" in texts(root)
    assert titles(root) == [
        "held out, untrained: loss 2.5000",
        "held out, after step 2: loss 1.6000",
        "after step 2: loss 1.5000",
    ]


@pytest.mark.parametrize("steps", [1, ROOM, 50_000])
def test_the_chart_stays_small_and_the_newest_step_is_exact(steps: int) -> None:
    chart = fed(view(6), total=steps)
    for number in range(steps):
        chart.add(step(number, loss=math.cos(number), time=0.01 * number))
        if number % 10 == 0:
            chart.add(evaluated(number, loss=0.5))
            chart.add(at(0.01 * number, event("drain_notice", node="n", deadline=None)))
    root = drawn(chart)
    assert len(chart.svg()) < 60_000
    assert all(len(curve) <= 4 * ROOM + 2 for curve in strokes(root))
    assert f"after step {steps}: loss {math.cos(steps - 1):.4f}" in titles(root)


def test_thinned_points_keep_mean_minimum_and_maximum() -> None:
    chart = Chart("gpt", 1000)
    for number in range(1000):
        chart.add(step(number, loss=5.0 if number == 500 else float(number % 2)))
    spans = list(chart._losses)
    assert ROOM / 2 <= len(spans) <= ROOM
    assert sum(span.count for span in spans) == 1000
    assert max(span.high for span in spans) == 5.0
    assert sum(span.count * span.mean for span in spans) == pytest.approx(505.0)
    assert spans[10].mean == pytest.approx(0.5)
    assert [span.at for span in spans] == sorted(span.at for span in spans)


def test_a_loss_that_is_not_finite_is_marked_and_flattens_nothing() -> None:
    root = drawn(fed(view(6), step(0, loss=2.0), step(1, loss="nan"), step(2, loss="inf"), step(3, loss=1.0)))
    assert "1 step with a loss that is not finite, after step 2" in titles(root)
    assert "1 step with a loss that is not finite, after step 3" in titles(root)
    assert "after step 4: loss 1.0000" in titles(root)
    assert "nan" not in ElementTree.tostring(root, "unicode")
    assert titles(drawn(fed(view(6), step(0, loss="nan")))) == ["1 step with a loss that is not finite, after step 1"]


def test_incidents_are_marked_with_what_they_were() -> None:
    root = drawn(
        fed(
            view(6, 6),
            at(10, event("drain_notice", node="0123456789abcdef", deadline=None)),
            rescaled(20, 2, 1),
            at(20, view(12)),
            rescaled(30, 1, 2),
            at(30, view(6, 6)),
            lost(60),
            # The smaller group after a loss is not a rescale.
            rescaled(61, 2, 1),
            at(61, view(12)),
            recovered(61),
            at(90, step(9)),
        )
    )
    assert titles(root)[1:] == [
        "node 0123456789ab will leave",
        "2 workers before, 1 now",
        "1 workers before, 2 now",
        "worker-0 was lost: killed\nrecovered in 0.31 s",
    ]
    assert {"1 lost worker", "1 drain", "2 rescales"} <= set(texts(root))


def test_a_worker_that_is_replaced_at_once_leaves_a_notch_in_the_line() -> None:
    root = drawn(fed(view(6, 6), at(10, step(0)), lost(20), at(20, view(6, 6)), at(40, step(1))))
    line = strokes(root)[-1]
    levels = [y for _, y in line]
    assert levels[0] == levels[-1] == min(levels)
    assert max(levels) > min(levels)
    assert line == sorted(line, key=lambda point: point[0])


def test_incidents_close_together_share_one_sign() -> None:
    root = drawn(
        fed(view(*[1] * 9), *(lost(5 + number / 100, f"worker-{number}") for number in range(7)), at(900, step(1)))
    )
    (told,) = [title for title in titles(root) if "was lost" in title]
    assert told.splitlines() == [*(f"worker-{number} was lost: killed" for number in range(4)), "and 3 more"]
    assert "7 lost workers" in texts(root)


def test_text_of_users_is_escaped() -> None:
    evil = "</title><script>&\x1b[31m\x00"
    root = drawn(fed(view(6), lost(1, cause=evil), name=evil))
    assert not list(root.iter(f"{SVG}script"))
    assert texts(root)[0] == "</title><script>& [31m "
    assert any("</title><script>&" in title for title in titles(root))


def test_a_resumed_run_drops_void_steps() -> None:
    events = [view(6), *(step(number, loss=9.0 if number > 4 else 1.0) for number in range(8)), evaluated(7, loss=9.0)]
    root = drawn(fed(*events, event("resumed", step=3, checkpoint="step-3", voided_to=7), step(4, loss=1.5)))
    assert "step 5 of 100, 5 %" in texts(root)
    assert "resumed from the checkpoint after step 4" in titles(root)
    assert not any("9.0" in title for title in titles(root))
    assert len(strokes(root)[0]) == 5


def test_time_between_two_controllers_does_not_count() -> None:
    started = event("run_started", job={}, versions={}, address="")
    root = drawn(fed(at(0, started), view(6), at(10, step(0)), at(100_000, started), at(100_010, step(1))))
    assert [text for text in texts(root) if text.endswith((" s", " h", " d"))][-1] == "20 s"
