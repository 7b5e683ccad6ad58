"""The record of a run whose controllers die at any point, and whose workers train on: as if nobody had died."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from raytrain_plus.audit.audit_record import read_record
from raytrain_plus.errors import StepsLost
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import claims_of, lease_holder
from raytrain_plus.runs.history import is_void, load_history
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.training.exchange.step_records import Evaluated, Remark
from tests.unit.controller.scripted_run import (
    NAMES,
    Act,
    ScriptedRun,
    entries,
    killed_at,
    perform,
    step,
    steps_told,
)

LAST = 13


def evaluated(number: int) -> Evaluated:
    return Evaluated(step=number, metrics={"accuracy": number / 100})


def make(name: int, *made: Any) -> Act:
    return "make", lambda run: run.make(NAMES[name], *made)


def script(replaced: bool) -> list[Act]:
    """Return the acts of a run with three changes of the group: steps stay, are void, and are made again.

    `replaced`: whether no member outlives the last two of them.
    """
    times = {number: 1000.0 + number for number in range(LAST + 1)}

    def made(number: int, **changes: Any) -> Any:
        return step(number, times[number], **changes)

    flush: Act = "flush", lambda run: run.flush()
    form: Act = "formed", lambda run: run.formed()
    seen = Remark("rows", "a row was seen")
    odd, rough = made(1, rows_skipped=2, remarks=(seen,)), made(4, skipped=True)
    acts: list[Act] = [("join", lambda run: run.join(0)), form, make(0, evaluated(-1))]
    acts += [make(0, made(0)), make(1, made(0)), make(0, odd, evaluated(1)), make(1, odd), make(1, made(2)), flush]
    # One worker is two steps ahead of what the other has reported.
    acts += [make(0, made(2), made(3)), make(1, made(3), rough), ("join", lambda run: run.join(5)), form]
    acts += [
        make(0, made(5)),
        make(1, made(5)),
        flush,
        make(0, made(6), evaluated(6)),
        make(1, made(6), made(7)),
        flush,
    ]
    # All that held the steps after 4 are gone.
    times = {number: time + 10 * (number > 4) for number, time in times.items()}
    acts += [flush, ("join", lambda run: run.join(5, replaced=replaced)), form]
    acts += [make(0, made(5), made(6), evaluated(6)), make(1, made(5), made(6)), make(1, made(7)), make(0, made(7))]
    acts += [make(0, made(8)), make(1, made(8), made(9)), flush, make(0, made(9), made(10)), make(1, made(10))]
    # A copy of the state after 8 is left: steps 9 and 10 are made again, and were committed.
    acts += [
        ("join", lambda run: run.join(9, again=10, replaced=replaced)),
        form,
        make(0, made(9)),
        make(1, made(9), made(10)),
    ]
    acts += [make(0, made(10)), make(0, made(11)), make(1, made(11)), flush, make(1, made(12), made(13))]
    return [*acts, make(0, made(12), evaluated(12), made(13)), ("finish", lambda run: run.finish())]


def performed(folder: Folder, replaced: bool, *points: int) -> tuple[ScriptedRun, Result, int]:
    """Perform a script with these kills; return the run, its result, and how many points it had."""
    with killed_at() as kills:
        run = ScriptedRun(folder)
        run.open()
        run.passed = kills.pass_point
        kills.points, kills.at = 0, points
        return run, perform(run, script(replaced)), kills.points


def check(run: ScriptedRun, result: Result, whole: Result) -> None:
    """Fail if anything of a run that was killed differs from the whole one."""
    folder, history = run.run, load_history(run.run)
    told = list(read_events(folder))
    assert steps_told(folder, history.resumptions) == list(range(LAST + 1))
    assert sorted(step for _, step in entries(folder, history.resumptions)) == list(range(LAST + 1))
    assert [number for number, _ in entries(folder, history.resumptions)] == sorted(
        number for number, _ in entries(folder, history.resumptions)
    )
    assert history.metrics == {number: evaluated(number).metrics for number in (-1, 1, 6, 12)}
    evaluations = [(event["generation"], event["step"]) for event in told if event["kind"] == "evaluated"]
    assert sorted(step for one, step in evaluations if not is_void(one, step, history.resumptions)) == [-1, 1, 6, 12]
    kinds = [event["kind"] for event in told]
    assert (kinds.count("run_started"), kinds.count("run_finished"), kinds.count("noted")) == (1, 1, 1)
    assert [start for _, start in history.resumptions] == [4]
    assert len({event["generation"] for event in told if event["kind"] == "view_formed"}) == kinds.count("view_formed")
    newest = -1
    for event in told:
        # What another controller tells belongs to the newest generation.
        assert event["kind"] != "controller_started" or event["generation"] >= newest
        newest = max(newest, event["generation"])
    record = read_record(folder)
    assert not record.lacks(LAST, max(number for number, _ in entries(folder, ())))
    for name in ("steps", "samples", "metrics", "skipped", "rows_skipped", "trained_steps", "trained_samples"):
        assert getattr(result, name) == getattr(whole, name), name
    assert (result.seconds, result.setup_s, result.model_metrics) == (whole.seconds, whole.setup_s, whole.model_metrics)
    assert Result.load(folder) == result


class Whole(NamedTuple):
    """A run whose controller was not killed, and how many points it had."""

    replaced: bool
    result: Result
    points: int


@pytest.fixture(scope="module", params=[False, True], ids=["the same workers", "other workers"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    run, result, points = performed(LocalFolder(tmp_path_factory.mktemp("whole") / "run"), request.param)
    check(run, result, result)
    assert (result.steps, result.skipped, result.rows_skipped, result.trained_steps) == (14, 1, 2, 14)
    assert run.heard == list(read_events(run.run))
    assert result.goodput < 1
    return Whole(request.param, result, points)


def test_a_controller_killed_at_any_point_costs_nothing(tmp_path: Path, whole: Whole) -> None:
    for point in range(whole.points):
        folder = LocalFolder(tmp_path / str(point) / "run")
        run, result, _ = performed(folder, whole.replaced, point)
        check(run, result, whole.result)
        assert result.goodput == whole.result.goodput
        # Its followers have heard of each event once, whichever controller told it.
        assert run.heard == list(read_events(folder))
        assert [event["adopted"] for event in run.heard if event["kind"] == "controller_started"] == [[], list(NAMES)]
        assert [one.told[0][:2] for one in run.listeners] == [("begin", 0)] * 2


@pytest.mark.parametrize("later", [1, 2, 7])
def test_nor_does_one_killed_soon_after(tmp_path: Path, whole: Whole, later: int) -> None:
    for point in range(0, whole.points, 1 + (later > 2)):
        run, result, _ = performed(LocalFolder(tmp_path / str(point) / "run"), whole.replaced, point, point + later)
        check(run, result, whole.result)
        assert run.heard == list(read_events(run.run))


def test_nor_does_one_whose_last_events_the_storage_lacks(bucket: Folder, tmp_path: Path, whole: Whole) -> None:
    for point in range(whole.replaced, whole.points, 2):
        folder = bucket.inside(tmp_path.name).inside(str(point)).inside("run")
        run, result, _ = performed(folder, whole.replaced, point)
        check(run, result, whole.result)


def adopted(folder: Folder) -> ScriptedRun:
    """Return a run whose controller has died after step 1, and was replaced."""
    with killed_at():
        run = ScriptedRun(folder)
        run.open()
        run.join(0)
        run.formed()
        for name in NAMES:
            run.make(name, step(0, 1000.0), step(1, 1001.0))
        run.die()
        run.adopt()
    return run


def test_the_lease_is_the_new_controllers_and_nothing_else_begins_again(tmp_path: Path) -> None:
    run = adopted(LocalFolder(tmp_path / "run"))
    assert lease_holder(run.run) is not None
    assert claims_of(run.run) == 2
    assert [event["kind"] for event in read_events(run.run)].count("run_started") == 1
    assert run.record.gauges.values(None)["raytrain_workers", ()] == 2
    run.die()


def test_later_generations_have_numbers_that_nothing_has(tmp_path: Path) -> None:
    run = adopted(LocalFolder(tmp_path / "run"))
    assert run.record.numbers.now == run.record.numbers.of(0) == 0
    # As for a checkpoint of a state that no generation holds.
    number = run.record.numbers.begin(0)
    run.record.saving(1, 0, 0, None)
    run.die()
    run.adopt()
    assert run.record.numbers.of(1) > run.record.numbers.now >= number == 1
    run.die()


def test_a_record_with_a_hole_is_left_as_it_is(tmp_path: Path) -> None:
    run = adopted(LocalFolder(tmp_path / "run"))
    run.flush()
    run.die()
    assert run.charter is not None
    run.charter = replace(run.charter, number=1, first_step=5)
    before = {name: run.run.read(name) for name in run.run.files()}
    with pytest.raises(StepsLost, match="step 3 is committed"):
        run.adopt()
    claim = "claims/00000003.json"
    assert {name: run.run.read(name) for name in run.run.files() if name != claim} == before


def test_a_step_in_the_ledger_alone_is_told_and_not_entered_again(tmp_path: Path) -> None:
    run = adopted(LocalFolder(tmp_path / "run"))
    run.flush()
    run.die()
    lines = run.run.read("events.ndjson").splitlines(keepends=True)
    run.run.write("events.ndjson", [line for line in lines if b'"step": 1' not in line])
    assert steps_told(run.run, ()) == [0]
    for name in NAMES:
        run.kept[name] = [(0, step(1, 1001.0))]
    run.adopt()
    run.flush()
    assert steps_told(run.run, ()) == [0, 1] == [number for _, number in entries(run.run, ())]
    run.die()


def test_a_step_that_is_made_again_stays_committed(tmp_path: Path) -> None:
    run = adopted(LocalFolder(tmp_path / "run"))
    run.flush()
    for name in NAMES:
        run.make(name, step(2, 1002.0))
    # It is told, and was not entered.
    run.join(2, again=2, replaced=True)
    run.die()
    run.adopt()
    assert run.record.committed == 2
    for name in NAMES:
        run.make(name, step(2, 1012.0), step(3, 1013.0))
    run.flush()
    assert steps_told(run.run, ()) == [0, 1, 2, 3] == [number for _, number in entries(run.run, ())]
    run.die()


def test_what_is_durable_is_in_events_and_ledger(run: Folder) -> None:
    with killed_at():
        scripted = ScriptedRun(run)
        assert scripted.record.durable == -1
        scripted.open()
        scripted.join(0)
        for number in range(3):
            for name in NAMES:
                scripted.make(name, step(number, 1000.0))
        assert scripted.record.durable == -1
        parts = scripted.record.journal._outlets._parts
        assert parts is not None
        parts._before = lambda: None
        parts.flush()
        # An object store has no event yet.
        assert scripted.record.durable == (-1 if run.path is None else 2)
        scripted.record.journal._outlets.sync()
        assert scripted.record.durable == 2
        scripted.make(NAMES[0], step(3, 1000.0), step(4, 1000.0))
        assert (scripted.record.committed, scripted.record.durable) == (3, 2)
        scripted.flush()
        assert scripted.record.durable == 3
        # What is made again after the state of step 1 is another step 2.
        scripted.join(2)
        assert scripted.record.durable == 1
        for name in NAMES:
            scripted.make(name, step(2, 1000.0))
        assert scripted.record.durable == 1
        scripted.flush()
        assert scripted.record.durable == 2
        scripted.die()
        scripted.adopt()
        assert scripted.record.durable == 2
        scripted.die()
