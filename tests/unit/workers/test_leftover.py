"""What a worker leaves in the run's folder, as the next controller reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.membership.mesh import Shape
from raytrain_plus.observe.gpu_use import GpuUse
from raytrain_plus.runs.folder import LEFT
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.training.exchange.step_records import Evaluated, Remark, StepRecord
from raytrain_plus.workers.messages import WorkerLocation, Written
from raytrain_plus.workers.states.leftover import LastGeneration, Leftover, leave, leftovers
from tests.support.states import shares, state

LAST = LastGeneration(
    number=12, generation=3, first_step=5, again=-1, seats=("worker-0", "worker-1"), shape=Shape(1, 2)
)


def written_in(run: LocalFolder) -> Written:
    [share] = shares(run, state(7), "000000000007-00000012", 1)
    tree = {"optimizer": {"w": {"step": 1.5}}, "groups": [], "scheduler": {}, "scales": {}, "persistent": []}
    return Written(
        step=7,
        generation=12,
        writer=0,
        writers=1,
        share=share,
        tree=tree,
        weights={"w": True},
        metrics={},
        time=1000.5,
        stall_s=0.1,
        error="",
    )


def left_in(run: LocalFolder, *records: Any) -> Leftover:
    return Leftover(
        location=WorkerLocation(worker="worker-0", pid=5, node="n", address="127.0.0.1"),
        last=LAST,
        records=[(12, record) for record in records],
        written=written_in(run),
    )


def test_all_that_a_record_needs_comes_back(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path / "run")
    first = StepRecord(
        step=6,
        rows=8,
        loss=0.1 + 0.2,
        seconds=0.5,
        waited_s=0.25,
        lr=(1e-3, 0.1),
        remarks=(Remark("a", "b"),),
        time=1000.125,
        metrics={"accuracy": 1 / 3, "worst": float("inf")},
        notes=bytes(range(256)),
        skipped_rows=b"\0\1",
        rows_skipped=1,
        passes=(1.0, 2.0),
    )
    second = StepRecord(step=7, rows=8, loss=1.0, seconds=0.5, waited_s=0.0, time=1001.0)
    told = [first, second, Evaluated(step=7, metrics={"loss": 0.3}), Remark("c", "d")]
    left = left_in(run, *told)
    leave(run, left)
    assert leftovers(run) == {"worker-0": left}


def test_what_is_of_its_moment_is_not_kept(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path / "run")
    leave(run, left_in(run, GpuUse.__new__(GpuUse), Remark("c", "d")))
    assert leftovers(run)["worker-0"].records == [(12, Remark("c", "d"))]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"format": 1, "loc', "JSONDecodeError"),
        ('{"format": 2}', "it has format 2, and this version reads format 1"),
        ('{"format": 1}', "KeyError: 'last'"),
        ("[]", "TypeError"),
        ('{"format": 1, "last": {}, "written": null, "location": {}, "records": []}', "WorkerLocation"),
    ],
)
def test_a_file_that_cannot_be_read_is_not_used(
    tmp_path: Path, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = LocalFolder(tmp_path / "run")
    leave(run, left_in(run))
    run.write(f"{LEFT}/worker-1.json", [text.encode()])
    assert list(leftovers(run)) == ["worker-0"]
    [logged] = caplog.records
    assert f"{LEFT}/worker-1.json cannot be read, so it is not used: " in logged.message
    assert why in logged.message


def test_a_record_that_lacks_a_field_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = LocalFolder(tmp_path / "run")
    leave(run, left_in(run, StepRecord(step=7, rows=8, loss=1.0, seconds=0.5, waited_s=0.0, time=1001.0)))
    document = json.loads(run.read(f"{LEFT}/worker-0.json"))
    del document["records"][0][2]["rows"]
    run.write(f"{LEFT}/worker-0.json", [json.dumps(document).encode()])
    assert not leftovers(run)
    assert "rows" in caplog.text
