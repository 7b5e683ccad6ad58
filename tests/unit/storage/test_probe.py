"""What one machine finds out about a storage in which another has written a file."""

import os
from pathlib import Path

import pytest

from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.probe import find_probe_fault, leave_probe, refusal


def test_the_same_folder_another_one_and_none(tmp_path: Path) -> None:
    with leave_probe(LocalFolder(tmp_path), "run") as probe:
        assert find_probe_fault(probe) == ""
        file = tmp_path / ".probe-run"
        assert os.listdir(tmp_path) == [file.name]
        file.write_bytes(b"a run of this name, elsewhere")
        assert find_probe_fault(probe) == "sees a different directory at this path"
        file.unlink()
        assert find_probe_fault(probe) == "sees a different directory, or none, at this path"
    assert not os.listdir(tmp_path)


def test_an_earlier_probe_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".probe-run").write_bytes(b"earlier")
    with leave_probe(LocalFolder(tmp_path), "run") as probe:
        assert find_probe_fault(probe) == ""
    assert not os.listdir(tmp_path)


def test_a_later_probe_is_not_removed(tmp_path: Path) -> None:
    with leave_probe(LocalFolder(tmp_path), "run"):
        later = leave_probe(LocalFolder(tmp_path), "run")
        probe = later.__enter__()
    assert find_probe_fault(probe) == ""
    later.__exit__(None, None, None)
    assert not os.listdir(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: LocalFolder, name: str, data: bytes) -> bool:
        raise PermissionError(13, "Permission denied")

    with leave_probe(LocalFolder(tmp_path), "run") as probe:
        # Root can write anywhere, so removing permissions would have no effect.
        monkeypatch.setattr(LocalFolder, "create", refused)
        assert find_probe_fault(probe) == "cannot write to this path: Permission denied"


def test_a_refusal_shows_no_keys() -> None:
    told = str(refusal("m", "sees a different directory at this path", "s3://KEY:hidden@bucket/runs"))
    assert "storage: s3://***@bucket/runs" in told
    assert "hidden" not in told
