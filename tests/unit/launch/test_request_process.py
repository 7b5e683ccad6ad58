"""A request reaches a run from a process of its own; its errors are those of that process, field by field."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from raytrain_plus import Data, Job, RunError, attach
from raytrain_plus.errors import InputError
from raytrain_plus.launch import request_process
from raytrain_plus.launch.request import StopRequest
from raytrain_plus.launch.request_process import send_apart
from raytrain_plus.storage.folders.local import LocalFolder


@pytest.fixture
def run(tmp_path: Path) -> LocalFolder:
    """A run that nobody holds."""
    run = LocalFolder(tmp_path / "gpt")
    run.write("job.yaml", [Job(name="gpt", task="a:B", data=Data(path="d", batch_size=8), steps=4).to_yaml().encode()])
    return run


def test_the_error_of_the_other_process_is_raised_with_its_fields(run: LocalFolder) -> None:
    with pytest.raises(RunError, match=r"gpt: the run is not running\n  fix: see how it ended") as told:
        attach(str(run.path)).stop()
    cause = told.value.__cause__
    assert isinstance(cause, InputError)
    assert (cause.what, cause.where) == ("the run is not running", run.where)
    assert cause.remedy == "see how it ended: raytrain status RUN"


def test_numbers_are_needed_to_rescale(run: LocalFolder) -> None:
    with pytest.raises(RunError, match="at least one of min, max and spares"):
        attach(str(run.path)).rescale()


def stand_in(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shell script answer in place of Python."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_process_that_gives_no_answer(run: LocalFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "cat >/dev/null; exit 3", monkeypatch)
    with pytest.raises(RunError, match=r"the run gpt cannot be reached \(exit code 3\)"):
        send_apart(run, StopRequest())
    stand_in(tmp_path, "cat >/dev/null; echo 'a traceback\nImportError: ray' >&2; exit 1", monkeypatch)
    with pytest.raises(RunError, match=r"the run gpt cannot be reached \(exit code 1: ImportError: ray\)"):
        send_apart(run, StopRequest())
    stand_in(tmp_path, "exec sleep 30", monkeypatch)
    monkeypatch.setattr(request_process, "REQUEST_S", 0.2)
    with pytest.raises(RunError, match="the run gpt did not answer the request within 0 s"):
        send_apart(run, StopRequest())


def test_a_bug_in_the_other_process_keeps_its_traceback() -> None:
    error = request_process._error_of(lambda: os.stat(1 / 0))  # type: ignore[arg-type]
    assert isinstance(error, RunError)
    assert "ZeroDivisionError" in str(error)
    assert "Please report it" in str(error)
    assert request_process._error_of(lambda: None) is None
