"""What `raytrain status` says of a run, from its folder alone."""

from __future__ import annotations

import sys

import pytest

from raytrain_plus.result import Result
from raytrain_plus.runfolder import Lease
from raytrain_plus.status import status
from raytrain_plus.storage.folder import Folder, open_folder
from tests.unit.test_past import committed, tell


def test_a_run_that_goes_on_is_held_by_somebody(run: Folder) -> None:
    tell(run, committed(0, 0, 1, 2))
    assert status(run).lines() == ["run: unfinished; 3 steps", "  no checkpoints yet"]
    Lease(run).renew()
    assert status(run).state.startswith("running (process ")
    Lease(run).release()
    Result(name="run", status="stopped", exit_code=130, path=run.path or run.address, steps=3, samples=24).save(run)
    assert status(run).to_json()["state"] == "stopped"


def test_a_storage_that_does_not_keep_a_second_writer_out_is_named(
    bucket: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "raytrain_plus.storage.s3", raising=False)
    found = status(open_folder(bucket.inside("bare").address))
    assert found.run == "bare"
    assert found.lines()[-1].startswith("  single writer not enforced")
