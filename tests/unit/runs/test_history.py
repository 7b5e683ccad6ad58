"""The history of a run as read from its folder, local or remote."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from raytrain_plus.data.ledger.ledger import NOTE
from raytrain_plus.data.ledger.ledger_files import LedgerFiles
from raytrain_plus.errors import InputError
from raytrain_plus.observe.run_events import Tail
from raytrain_plus.runs.history import Past, entered_to, load_history
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


STARTED = {"job": "", "versions": {}, "address": ""}


def view(*names: str) -> dict[str, Any]:
    members = [
        {"worker": name, "pid": pid, "node": "n", "replica": pid, "stage": 0, "params": 1, "shards": [pid]}
        for pid, name in enumerate(names)
    ]
    return {"members": members, "spares": [], "collective": "torch", "moved_bytes": 0}


def test_a_start_is_what_came_since_the_last_run_started(run: Folder) -> None:
    fields = {"cause": "", "steps_lost": 0, "steps_recomputed": 0, "kept": [], "replaced": [], "phases": {}}
    earlier = [
        (0, "run_started", STARTED),
        (0, "requested", {"what": "stop"}),
        (0, "view_formed", view("worker-7")),
        (0, "noted", {"text": "earlier"}),
        *committed(0, 0, 1, 2),
        (0, "recovered", {"stall_s": 0.5, **fields}),
        (0, "checkpoint_saved", {"step": 1, "seconds": 0.1, "stall_s": 0.0, "checkpoint": "one"}),
        (0, "run_finished", {"status": "stopped", "error": None, "steps": 3, "samples": 8, "state_sha256": None}),
    ]
    tell(run, earlier)
    tail = Tail(run)
    assert len(list(tail.read())) == len(earlier)
    past = load_history(run)
    assert (past.behind, past.told, past.over, past.named, past.formed) == (0, len(earlier), "stopped", 7, 0)
    assert (past.saved, past.noted, past.sums.first_step) == ({"one"}, {"earlier"}, 0)
    assert [event["what"] for event in past.requested] == ["stop"]
    later = [
        (1, "run_started", STARTED),
        (1, "controller_started", {"pid": 1, "node": "n", "adopted": []}),
        (1, "noted", {"text": "new"}),
        resumed(1, 1, 2),
        (1, "view_formed", view("worker-0", "worker-2")),
        *committed(1, 2),
        (1, "requested", {"what": "rescale", "maximum": 3}),
        (1, "checkpoint_saved", {"step": 2, "seconds": 0.1, "stall_s": 0.0, "checkpoint": "two"}),
        (1, "worker_lost", {"worker": "worker-11", "pid": 1, "node": "n", "cause": "worker-99 was rude"}),
        *[(1, "controller_started", {"pid": 1, "node": "n", "adopted": ["worker-0"]})] * 2,
    ]
    tell(run, later)
    past = load_history(run)
    place = tail.place if run.path is not None else (1, 0)
    assert (past.behind, past.told, past.over, past.named, past.formed, past.started) == (
        place[0], len(later), "", 11, 1, 2
    )  # fmt: skip
    assert (past.saved, past.noted) == ({"two"}, {"new"})
    assert [event["what"] for event in past.requested] == ["rescale"]
    assert (past.sums.first_step, past.sums.again_to, past.sums.again_s, past.sums.earlier_stall_s) == (2, 2, 0.1, 0.5)
    assert (past.sums.loss, past.sums.grad_norm) == (1.0, 0.3)
    assert past.last_time == past.sums.first_time == past.sums.time > 0
    assert [event["kind"] for event in Tail(run, past.behind).read()] == [kind for _, kind, _ in later]


def test_plain_steps_are_read_as_others_are(run: Folder) -> None:
    """Steps without optional fields are read in another way, because there are so many of them."""
    optional = {"lr": [0.1, 1e-05], "metrics": {"share": 0.5}}
    kinds = [{}, {"lr": 0.5}, {"lr": [0.5, 1e-07]}, {"loss": math.nan}, {"grad_norm": 1e300}, {"seconds": 1e-06}]
    for more in ({}, optional):
        steps = [
            (generation, kind, {**fields, **kinds[fields["step"] % len(kinds)], **more})
            for generation, numbers in ((0, range(20)), (2, range(10, 15)))
            for generation, kind, fields in committed(generation, *numbers)
        ]
        tell(run, [(0, "run_started", STARTED), *steps[:20], resumed(1, 9, 19), *steps[20:]])
    past = load_history(run)
    # The second start tells the same, with metrics.
    plain = list(Tail(run).read())[:27]
    other = run.inside("plain")
    tell(other, [(event["generation"], event["kind"], _fields(event)) for event in plain])
    alone = load_history(other)
    assert (alone.committed, alone.generation, alone.sums.again_to, alone.sums.first_step) == (14, 2, 19, 0)
    assert alone.sums.again_s == pytest.approx(past.sums.again_s) == pytest.approx(0.400001)
    assert dataclasses.replace(past.sums, time=0.0, first_time=0.0, again_s=0.0) == dataclasses.replace(
        alone.sums, time=0.0, first_time=0.0, again_s=0.0
    )


def _fields(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("time", "generation", "kind")}


def test_a_damaged_step_is_refused(run: Folder) -> None:
    tell(run, committed(0, 0))
    [name] = run.files()
    run.write(name, [run.read(name).replace(b'"loss": 1.0', b'"loss": 01.0'), run.read(name)])
    with pytest.raises(InputError, match="line 1: the file is damaged"):
        load_history(run)


def test_the_ledger_is_entered_to_the_last_step_that_is_not_void(run: Folder) -> None:
    tell(run, [(0, "run_started", STARTED), *committed(0, *range(6))])
    assert entered_to(run, load_history(run)) == -1
    notes = np.zeros(2, NOTE).tobytes()
    ledger = LedgerFiles(run)
    for step in range(4):
        ledger.add(0, step, notes)
    ledger.close()
    assert entered_to(run, load_history(run)) == 3
    tell(run, [resumed(1, 1, 5)])
    # The steps after it are in a part that begins before it.
    assert entered_to(run, load_history(run)) == 1
    ledger = LedgerFiles(run)
    ledger.add(1, 2, notes)
    ledger.close()
    assert entered_to(run, load_history(run)) == 2
    run.write("ledger/00000001-000000000002.parquet", [b"PAR1"])
    with pytest.raises(InputError, match=r"ledger/00000001-000000000002\.parquet: the file is damaged"):
        entered_to(run, load_history(run))
