"""What is said before a finished run is extended."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as rates

from raytrain_plus.data.dataset import training_data
from raytrain_plus.errors import DataError, InputError
from raytrain_plus.result import Result
from raytrain_plus.runs.resumption import _check_data, check_schedule, schedule_end
from raytrain_plus.schedules import warmup_cosine
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.tokenizers import job, save


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
    check_schedule(run, SimpleNamespace(found=(damaged, newest)), 40)  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert (said != "") == warns
    assert ("finished after 30 steps with a learning rate of 0: more steps change no weights" in said) == warns


def state_of(make: Any) -> dict[str, Any]:
    """Return the tree of a checkpoint with the state of a schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    return {"groups": [], "scheduler": json.loads(json.dumps(make(optimizer).state_dict()))}


SCHEDULES: dict[str, tuple[Any, tuple[str, int]]] = {
    "cosine": (lambda one: rates.CosineAnnealingLR(one, 30), ("CosineAnnealingLR", 30)),
    "one cycle": (lambda one: rates.OneCycleLR(one, 0.1, total_steps=30), ("OneCycleLR", 30)),
    "a warm start": (
        lambda one: rates.SequentialLR(one, [rates.LinearLR(one), rates.CosineAnnealingLR(one, 25)], [5]),
        ("CosineAnnealingLR", 30),
    ),
    "of the length of the run": (lambda one: warmup_cosine(one, 30), ("", 0)),
    "restarts": (lambda one: rates.CosineAnnealingWarmRestarts(one, 10), ("", 0)),
    "for ever": (lambda one: rates.ExponentialLR(one, 0.9), ("", 0)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_ends_before_the_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    make, (kind, end) = SCHEDULES[name]
    tree = state_of(make)
    assert schedule_end(tree) == (kind, end)
    past: Any = SimpleNamespace(found=[SimpleNamespace(manifest=SimpleNamespace(step=29, tree=tree))])
    run = LocalFolder(tmp_path)
    check_schedule(run, past, 30)
    assert capsys.readouterr().err == ""
    if kind == "OneCycleLR":
        with pytest.raises(InputError, match=r"OneCycleLR, has 30 steps, and fails in the one after them") as caught:
            check_schedule(run, past, 40)
        assert "--fresh-rates" in str(caught.value)
        return
    check_schedule(run, past, 40)
    said = capsys.readouterr().err
    assert ("ends after 30 steps, and raises the learning rate again in the 10 after them" in said) == bool(kind)


def test_a_run_does_not_resume_with_another_tokenizer(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    wanted = job(tmp_path, tmp_path / "saved")
    run = LocalFolder(tmp_path)
    run.write("dataset.json", [json.dumps(training_data(wanted, []).describe()).encode()])
    _check_data(run, wanted, training_data(wanted, []))
    save(tmp_path / "saved", change=1)
    with pytest.raises(DataError, match=r"changed since the run started: data\.tokenizer has another content"):
        _check_data(run, wanted, training_data(wanted, []))
