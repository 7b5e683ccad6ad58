"""Faults that a user asks for: what they are, and when their moment has come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.launch import fault as module
from raytrain_plus.launch.fault import FaultInjection, InjectedFault, ProcessesOfRun, read_fault
from raytrain_plus.observe.run_events import EventLog
from raytrain_plus.storage.folders.local import LocalFolder

WORKER = {"worker": "worker-0", "pid": 7, "node": "n"}


def told(*kinds: str) -> ProcessesOfRun:
    """Return what a run does that has told these events."""
    fields: dict[str, dict[str, Any]] = {
        "controller_started": {"pid": 5, "node": "n", "adopted": []},
        "view_formed": {"members": [WORKER]},
        "step_committed": {"step": 9},
    }
    fields["worker_lost"] = WORKER
    now = ProcessesOfRun()
    for kind in kinds:
        now.add({"kind": kind, **fields.get(kind, {})})
    return now


@pytest.mark.parametrize("text", ["kill controller at=join", " kill  worker   at=20 "])
def test_a_fault_is_read(text: str) -> None:
    assert str(read_fault(text)) == " ".join(text.split())


@pytest.mark.parametrize("text", ["", "kill", "kill everybody at=join", "kill worker at=noon", "kill worker at=-1"])
def test_another_text_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(InputError, match=r"is no fault") as caught:
        read_fault(text)
    assert "join, recovery, checkpoint, end or a number of steps" in str(caught.value)


def test_moments_come_with_events() -> None:
    assert not told().due("join", saves=False)
    assert told("controller_started").due("join", saves=False)
    trains = told("controller_started", "view_formed", "step_committed")
    assert [trains.due(at, saves=False) for at in (10, 11, "recovery", "checkpoint", "end")] == [True, *[False] * 4]
    assert trains.due("checkpoint", saves=True)
    assert told("view_formed", "worker_lost").due("recovery", saves=False)
    assert told("view_formed", "worker_lost").members == []
    assert not told("view_formed", "worker_lost", "view_formed").due("recovery", saves=False)
    assert told("saving").due("end", saves=False)


def test_processes_are_killed_once_and_what_did_not_happen_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[tuple[str, int]] = []
    monkeypatch.setattr(module, "kill_process", lambda node, pid: killed.append((node, pid)))
    run = LocalFolder(tmp_path)
    # Of an earlier start of the run: nothing to kill.
    log = EventLog(run)
    log.write("controller_started", generation=0, fields={"pid": 4, "node": "n", "adopted": []})
    late = InjectedFault("worker", "end")
    with FaultInjection(run, [InjectedFault("controller", "join"), late]) as injection:
        log.write("controller_started", generation=0, fields={"pid": 5, "node": "n", "adopted": []})
        while len(injection._left) > 1:
            assert injection._thread.is_alive()
    log.close()
    assert killed == [("n", 5)]
    said = capsys.readouterr().err
    assert "fault injected: kill controller at=join (process 5)" in said
    assert f"fault not injected, because the run ended before: {late}" in said
