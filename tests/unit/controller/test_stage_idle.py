"""How long stages wait for one another, and the drawing of one step."""

from __future__ import annotations

import pytest

from raytrain_plus.controller.record.sums.stage_idle import Bubble
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.membership.view import form_view
from raytrain_plus.parallel.pipeline.timeline import Action, Bar
from raytrain_plus.training.exchange.step_records import StepRecord


def record(
    step: int, busy_s: float = 0.0, passes: tuple[float, float] = (0.0, 0.0), at: float | None = None, stage: int = 0
) -> StepRecord:
    """`at`: when its one bar begins, if it is drawn."""
    return StepRecord(
        step=step,
        rows=8,
        loss=1.0,
        seconds=1.0,
        waited_s=0.0,
        time=at or 0.0,
        busy_s=busy_s,
        passes=passes,
        bars=() if at is None else (Bar(stage, Action("F", stage, 0), at, at + 0.5),),
    )


def test_the_share_of_the_time_in_which_stages_wait() -> None:
    bubble = Bubble()
    assert bubble.share is None
    bubble.formed(form_view(0, ["a", "b"], Shape(1, 2), 4))
    for step in range(3):
        # The front begins first and ends last; the clock of b is ten seconds late.
        bubble.report("a", record(step, 0.3, (step, step + 0.4)), 0.0)
        bubble.report("b", record(step, 0.1, (step - 9.9, step - 9.7)), 10.0)
    bubble.report("a", record(3, 0.3, (3.0, 9.0)), 0.0)
    assert bubble.share == pytest.approx(0.5), "a report from one member of a replica does not count"


def test_a_replica_is_counted_once_all_its_tensor_ranks_have_reported() -> None:
    bubble = Bubble()
    bubble.formed(form_view(0, "abcd", Shape(1, 2, 2), 4))
    for worker, busy_s in zip("abc", (0.3, 0.3, 0.1), strict=True):
        bubble.report(worker, record(0, busy_s, (0.0, 0.4)), 0.0)
    assert bubble.share is None
    bubble.report("d", record(0, 0.1, (0.0, 0.4)), 0.0)
    assert bubble.share == pytest.approx(0.5)


def test_one_of_the_workers_that_share_a_stage_is_drawn() -> None:
    bubble = Bubble()
    bubble.formed(form_view(0, "abcd", Shape(1, 2, 2), 4))
    reports = [bubble.report(worker, record(0, 0.1, at=1.0, stage="abcd".index(worker) // 2), 0.0) for worker in "abcd"]
    drawn = reports[2]
    assert drawn is not None
    assert list(drawn) == [(0, 0), (0, 1)]


@pytest.mark.parametrize("shape", [Shape(2, 1), Shape(1, 1, 2)])
def test_a_replica_of_one_stage_waits_for_no_stage(shape: Shape) -> None:
    """Such as those of `parallel.sharded: full`, which compute layer by layer, too, and those in slices."""
    bubble = Bubble()
    bubble.formed(form_view(0, ["a", "b"], shape, 4))
    for worker in "ab":
        assert bubble.report(worker, record(0, 0.3, (0.0, 0.4), at=100.0), 0.0) is None
    assert bubble.share is None


def test_a_step_is_drawn_when_all_members_have_reported_it() -> None:
    bubble = Bubble()
    bubble.formed(form_view(0, ["a", "b"], Shape(1, 2), 4))
    # The clock of b is ten seconds late.
    assert bubble.report("b", record(3, at=90.5, stage=1), 10.0) is None
    drawing = bubble.report("a", record(3, at=100.0), 0.0)
    assert drawing == {
        (0, 0): (Bar(0, Action("F", 0, 0), 0.0, 0.5),),
        (0, 1): (Bar(1, Action("F", 1, 0), 0.5, 1.0),),
    }


def test_a_step_reported_by_part_of_a_view_is_not_drawn() -> None:
    bubble = Bubble()
    bubble.formed(form_view(0, ["a", "b"], Shape(1, 2), 4))
    assert bubble.report("a", record(3, at=100.0), 0.0) is None
    bubble.formed(form_view(1, ["a", "c"], Shape(1, 2), 4))
    assert bubble.report("b", record(3, at=101.0), 0.0) is None
    assert bubble.report("c", record(9, at=101.0), 0.0) is None
    assert bubble.report("a", record(9, at=101.0), 0.0) is not None
