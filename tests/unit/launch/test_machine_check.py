"""The check that a machine sees a run's storage and data."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_plus import Data, InputError, Job
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.launch import machine_check
from raytrain_plus.launch.machine_check import Needs, Seen, check_machine, check_seen, needs_of
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.probe import Probe, leave_probe
from tests.support.datasets import write

GOOD = Seen("", "", "")


def order(path: Path, **data: Any) -> Any:
    job = Job(name="job", task="t:T", steps=1, data=Data(path=str(path), batch_size=8, **data))
    plan = SimpleNamespace(job=job, data=parquet_source(path), held_out=None, folder=str(path.parent / "runs" / "job"))
    plan.collective = "torch"
    return SimpleNamespace(plan=plan)


def test_a_machine_that_sees_everything_has_no_problems(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet", 10)
    write(tmp_path / "data" / "b.parquet", 10)
    (tmp_path / "runs").mkdir()
    with leave_probe(LocalFolder(tmp_path / "runs"), "x") as probe:
        needs = needs_of(order(tmp_path / "data"), probe)
        assert (probe.where, len(needs.data), needs.horovod) == (str(tmp_path / "runs"), 2, False)
        assert check_machine(needs) == GOOD
        assert os.listdir(tmp_path / "runs") == [".probe-x"]
        assert len(needs_of(order(tmp_path / "data" / "a.parquet"), probe).data) == 1
        assert set(needs_of(order(tmp_path / "data" / "[b-z]*.parquet"), probe).data) == {
            str(tmp_path / "data" / "b.parquet")
        }
        assert not needs_of(order(tmp_path / "data", prepare="t:prepare"), probe).data
    (tmp_path / "data" / "b.parquet").unlink()
    assert "b.parquet" in check_machine(needs).data
    assert "a.parquet" in check_machine(replace(needs, data={str(tmp_path / "data" / "a.parquet"): 1})).data


def test_without_a_usable_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine_check, "horovod_state", lambda: SimpleNamespace(usable=False, reason="for a torch other than 2.14.0")
    )
    none = Probe("nowhere", "x", b"")
    assert [check_machine(Needs(none, {}, needed)).horovod for needed in (True, False)] == [
        "for a torch other than 2.14.0",
        "",
    ]


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (Seen("sees a different directory at this path", "", ""), r"storage: runs.*machine m sees a different dir"),
        (Seen("cannot write there: Permission denied", "", ""), r"storage: runs.*machine m cannot write there: Perm"),
        (Seen("", "sees a file of another size at a", ""), r"data\.path.*machine m sees a file of another size at a"),
        (Seen("", "", "horovod is not installed"), r"machine m: horovod is not installed.*raytrain install-horovod"),
    ],
)
def test_problems_are_reported(tmp_path: Path, seen: Seen, told: str) -> None:
    write(tmp_path / "a.parquet", 10)
    one = order(tmp_path / "a.parquet")
    check_seen(one, "m", GOOD)
    with pytest.raises(InputError) as error:
        check_seen(one, "m", seen)
    assert re.search(told, str(error.value), re.DOTALL)
