"""A result is saved whole or not at all, and loads equal."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.controller.record.sums.totals import WARM_UP_S, Totals
from raytrain_plus.errors import InputError
from raytrain_plus.result import Result, saved_text
from raytrain_plus.storage.interface import Folder
from raytrain_plus.training.exchange.step_records import StepRecord


def record(step: int, time: float, seconds: float = 1.0, waited_s: float = 0.0) -> StepRecord:
    return StepRecord(step=step, rows=8, loss=1.0 / (step + 1), seconds=seconds, waited_s=waited_s, time=time)


def result_of(totals: Totals, path: Path | str) -> Result:
    return totals.result(
        name="run",
        status="finished",
        path=path,
        metrics={},
        state_sha256=None,
        error=None,
        show=None,
        began=8.0,
        bubble=None,
        ended=20.0,
    )


def test_a_saved_result_loads_equal_and_says_everything_in_json(run: Folder) -> None:
    assert Result.load(run) is None
    totals = Totals()
    totals.add(record(0, 10.0))
    result = result_of(totals, run.path or run.address)
    result.save(run)
    assert Result.load(run) == result
    assert json.loads(run.read("result.json")) == result.to_json()
    assert set(run.files()) == {"result.json"}


def test_metrics_that_are_not_finite_survive_plain_json(run: Folder) -> None:
    result = replace(result_of(Totals(), run.path or run.address), metrics={"loss": math.nan, "most": math.inf})
    result = replace(result, model_step=-1, model_metrics={"loss": math.nan})
    result.save(run)
    read = json.loads(run.read("result.json"), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert read["metrics"] == {"loss": "nan", "most": "inf"}
    loaded = Result.load(run)
    assert loaded is not None
    assert (math.isnan(loaded.metrics["loss"]), loaded.metrics["most"]) == (True, math.inf)
    assert (loaded.model_step, math.isnan(loaded.model_metrics["loss"])) == (-1, True)


@pytest.mark.parametrize(
    ("damaged", "match"),
    [
        (b'{\n"name": "run",\n"status" "finished"}', r"result\.json, line 3: the file is damaged: Expecting"),
        (b"[]", r"result\.json, line 1: the file is damaged: it is not an object"),
        (b"\xff", r"result\.json, line 1: the file is damaged: UnicodeDecodeError"),
        (b'{"name": "run"}', r"result\.json: not a valid result for this version: the field 'status' is missing"),
        (
            b'{"name": "run", "nome": ""}',
            r"result\.json: not a valid result for this version: unknown field 'nome'",
        ),
    ],
)
def test_a_damaged_result_is_reported_with_its_place(run: Folder, damaged: bytes, match: str) -> None:
    run.write("result.json", [damaged])
    with pytest.raises(InputError, match=match):
        Result.load(run)


def test_a_result_says_where_it_lies() -> None:
    result = result_of(Totals(), "s3://bucket/run?region=x")
    assert result.to_json()["path"] == "s3://bucket/run?region=x"


def test_steps_add_up(tmp_path: Path) -> None:
    totals = Totals()
    # The first second is warm-up: waiting in it is not counted.
    totals.add(record(0, 10.0, waited_s=0.9))
    totals.add(record(1, 10.0 + WARM_UP_S, seconds=1.0, waited_s=0.25))
    totals.add(record(2, 12.0, seconds=1.0, waited_s=0.25))
    result = result_of(totals, tmp_path)
    assert (result.steps, result.samples, result.metrics) == (3, 24, {"train_loss": 1 / 3})
    assert (result.setup_s, result.seconds, result.data_wait) == (2.0, 2.0, 0.25)
    assert (result.recoveries, result.stall_s, result.goodput) == (0, 0.0, 1.0)


def test_losses_lower_the_goodput(tmp_path: Path) -> None:
    totals = Totals()
    totals.add(record(0, 10.0))
    totals.recovered(1.0)
    totals.recovered(1.5)
    totals.add(record(1, 20.0))
    result = result_of(totals, tmp_path)
    assert (result.recoveries, result.stall_s, result.goodput) == (2, 2.5, 0.75)


def test_a_run_without_a_step_has_no_metrics(tmp_path: Path) -> None:
    result = result_of(Totals(), tmp_path)
    assert (result.steps, result.setup_s, result.seconds, result.goodput) == (0, None, 0.0, 1.0)


def test_only_the_steps_of_this_process_count_as_trained(tmp_path: Path) -> None:
    totals = Totals()
    totals.back_to(3, 32, 5)
    totals.add(record(4, 10.0))
    totals.add(record(5, 11.0))
    result = result_of(totals, tmp_path)
    assert (result.steps, result.samples, result.trained_steps, result.trained_samples) == (6, 48, 2, 16)
    # Returned to the state of an earlier process, and to one of its own.
    for step, trained in ((1, 4), (4, 4)):
        totals.back_to(step, 8 * step + 8, 5)
        for again in range(step + 1, 6):
            totals.add(record(again, 12.0))
        assert result_of(totals, tmp_path).trained_steps == trained


def test_a_resumed_run_counts_the_recoveries_of_its_earlier_processes(tmp_path: Path) -> None:
    totals = Totals(2, 5.0, {1, 9})
    totals.back_to(3, 32, 3)
    totals.add(record(4, 10.0, seconds=0.0))
    totals.recovered(1.0)
    totals.add(record(5, 20.0, seconds=0.0))
    result = result_of(totals, tmp_path)
    assert (result.recoveries, result.stall_s, result.skipped, result.goodput) == (3, 6.0, 1, 0.9)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"saved_step": 30}, "state after step 31 saved"),
        (
            {"saved_step": 19, "unsaved": "nothing of it was written for 121 s"},
            "state after step 31 NOT saved: nothing of it was written for 121 s; newest complete: step 20",
        ),
        ({"unsaved": "no space"}, "state after step 31 NOT saved: no space; newest complete: none"),
        ({"steps": 0}, "no step was completed: there is no state to save"),
        # A run that was resumed, and stopped before its workers had read the checkpoint.
        ({"steps": 0, "saved_step": 29}, "no new step was completed; the checkpoint after step 30 is complete"),
        ({"status": "finished", "saved_step": 30}, None),
        # The result of an older version.
        ({}, None),
    ],
)
def test_a_stopped_run_says_whether_its_state_is_saved(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    result = replace(result_of(Totals(), tmp_path), **{"status": "stopped", "steps": 31, **changes})
    assert saved_text(result) == text
