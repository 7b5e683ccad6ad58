"""What `raytrain status` says of a run, from its folder alone."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.result import Result
from raytrain_plus.runfolder import Fence, Lease
from raytrain_plus.status import status
from raytrain_plus.storage.folder import Folder, open_folder
from raytrain_plus.storage.local import Disk, LocalFolder
from tests.unit.storage.disk import Linkless
from tests.unit.test_past import committed, tell


def test_a_run_that_goes_on_is_held_by_somebody(run: Folder) -> None:
    tell(run, committed(0, 0, 1, 2))
    assert status(run).lines() == ["run: unfinished; 3 steps", "  no checkpoints yet"]
    Lease(run).renew()
    assert status(run).state.startswith("running (process ")
    Lease(run).release()
    Result(name="run", status="stopped", exit_code=130, path=run.path or run.address, steps=3, samples=24).save(run)
    assert status(run).to_json()["state"] == "stopped"


def test_what_is_damaged_is_told_and_no_fault_of_ours(tmp_path: Path) -> None:
    """Each was a traceback."""
    for damage, match in (
        (lambda run: run.write("events.ndjson", [b"{}\n"]), r"run/events\.ndjson, line 1: the file is damaged"),
        (lambda run: run.write("result.json", [b"{}"]), r"run/result\.json: it holds no result"),
        (lambda run: (run.path / "checkpoints").symlink_to(tmp_path), "run/checkpoints: a link leads out"),
        (lambda run: (run.path / "claims").symlink_to(tmp_path), "run/claims: a link leads out"),
    ):
        run = LocalFolder(tmp_path / "run")
        tell(run, committed(0, 0))
        damage(run)
        with pytest.raises(InputError, match=match):
            status(run)
        shutil.rmtree(tmp_path / "run")


def test_a_storage_that_does_not_keep_a_second_writer_out_is_named(
    bucket: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "raytrain_plus.storage.s3", raising=False)
    run = open_folder(bucket.inside("bare").address)
    found = status(run)
    assert found.run == "bare"
    assert found.lines()[-1].startswith("  single writer not enforced")
    Fence(run, 0)
    assert not status(run).single_writer


def test_a_file_system_that_only_says_so_is_found_out(tmp_path: Path) -> None:
    class Replacing(Disk):
        def link(self, path: Path, to: Path) -> None:
            path.replace(to)

    assert status(LocalFolder(tmp_path / "run")).single_writer
    Fence(LocalFolder(tmp_path / "run", Replacing()), 0)
    assert not status(LocalFolder(tmp_path / "run")).single_writer
    Fence(LocalFolder(tmp_path / "run", Linkless()), 1)
    assert status(LocalFolder(tmp_path / "run")).single_writer
    (tmp_path / "run" / "claims" / "00000002.json").write_bytes(b"{")
    assert status(LocalFolder(tmp_path / "run")).single_writer
