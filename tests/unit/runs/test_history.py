"""The history of a run as read from its folder, local or remote."""

from __future__ import annotations

import math
from typing import Any

from raytrain_plus.runs.history import Past, load_history
from raytrain_plus.storage.interface import Folder
from tests.support.events import committed, resumed, tell


def evaluated(generation: int, step: int, loss: float) -> tuple[int, str, dict[str, Any]]:
    return generation, "evaluated", {"step": step, "metrics": {"loss": loss}}


def test_a_missing_folder_has_an_empty_history(run: Folder) -> None:
    assert load_history(run) == Past()


def test_the_history_sums_up_the_events(run: Folder) -> None:
    tell(run, [evaluated(0, -1, 9.0), *committed(0, 0, 1, 2), evaluated(2, 2, 5.0), *committed(2, 3)])
    past = load_history(run)
    assert (past.generation, past.committed, past.evaluated, past.metrics) == (
        2,
        3,
        2,
        {-1: {"loss": 9.0}, 2: {"loss": 5.0}},
    )


def test_a_resumption_voids_later_steps(run: Folder) -> None:
    tell(run, [evaluated(0, -1, 9.0), *committed(0, 0, 1, 2), evaluated(0, 2, 5.0)])
    # Another controller resumes from an earlier state.
    tell(run, [resumed(1, 0, 2), *committed(1, 1)])
    past = load_history(run)
    assert (past.generation, past.committed, past.evaluated, past.metrics) == (1, 1, -1, {-1: {"loss": 9.0}})
    assert past.resumptions == ((1, 0),)


def test_recoveries_add_up_and_void_skipped_steps_do_not(run: Folder) -> None:
    skipped = [(0, "step_committed", {**fields, "skipped": True}) for _, _, fields in committed(0, 1, 2)]
    fields = {"cause": "", "steps_lost": 0, "steps_recomputed": 0, "kept": [], "replaced": [], "phases": {}}
    recovered = (0, "recovered", {"stall_s": 0.5, **fields})
    tell(run, [*committed(0, 0), recovered, *skipped, recovered, resumed(1, 1, 2)])
    past = load_history(run)
    assert (past.recoveries, past.stall_s, past.skipped) == (2, 1.0, {1})


def test_rows_skipped_in_void_steps_do_not_count(run: Folder) -> None:
    rows = [(0, "step_committed", {**fields, "rows_skipped": 2}) for _, _, fields in committed(0, 1, 2)]
    tell(run, [*committed(0, 0), *rows, resumed(1, 1, 2)])
    assert load_history(run).rows_skipped == {1: 2}


def test_ledger_parts_raise_the_generation(run: Folder) -> None:
    tell(run, committed(0, 0))
    run.write("ledger/00000007-000000000000.parquet", [b""])
    run.write("ledger/notes.txt", [b""])
    assert load_history(run).generation == 7


def test_metrics_that_are_not_finite_become_floats_again(run: Folder) -> None:
    tell(run, [evaluated(0, -1, math.inf)])
    assert load_history(run).metrics == {-1: {"loss": math.inf}}
