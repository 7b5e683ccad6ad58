"""What is said before a finished run is extended."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_plus.data.dataset import training_data
from raytrain_plus.errors import DataError
from raytrain_plus.launch.preflight import _check_data, _warn_of_an_ended_schedule
from raytrain_plus.result import Result
from raytrain_plus.storage.local import LocalFolder
from tests.unit.data.test_tokens import job, save


def groups(*rates: Any) -> list[dict[str, Any]]:
    return [{"parameters": [], "settings": {"lr": rate}} for rate in rates]


@pytest.mark.parametrize(
    ("status", "tree", "warns"),
    [
        ("finished", groups(0.0, 0), True),
        ("finished", groups(0.0, 0.1), False),
        ("finished", groups({"~": "tensor"}), False),
        ("finished", groups(None), False),
        ("finished", None, False),
        ("stopped", groups(0.0), False),
    ],
)
def test_a_schedule_that_has_ended_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str, tree: Any, warns: bool
) -> None:
    run = LocalFolder(tmp_path)
    Result(name="x", status=status, exit_code=0, path=tmp_path, steps=30, samples=1).save(run)
    damaged = SimpleNamespace(manifest=None)
    newest = SimpleNamespace(manifest=SimpleNamespace(step=29, tree={"groups": tree}))
    _warn_of_an_ended_schedule(run, SimpleNamespace(found=(damaged, newest)))  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert (said != "") == warns
    assert ("finished after 30 steps with a learning rate of 0: more steps change no weights" in said) == warns


def test_a_run_does_not_resume_with_another_tokenizer(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    wanted = job(tmp_path, tmp_path / "saved")
    run = LocalFolder(tmp_path)
    run.write("dataset.json", [json.dumps(training_data(wanted, []).to_json()).encode()])
    _check_data(run, wanted, training_data(wanted, []))
    save(tmp_path / "saved", change=1)
    with pytest.raises(DataError, match=r"changed since the run started: data\.tokenizer has another content"):
        _check_data(run, wanted, training_data(wanted, []))
