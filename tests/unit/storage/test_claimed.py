"""A run's folder changes only while its claim is in it; a folder that was moved away is never created again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain_plus.errors import FolderGone
from raytrain_plus.runs.folder import Fence
from raytrain_plus.storage.folders.claimed import Claim, Claimed
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder
from tests.unit.storage.store import KINDS

everywhere = pytest.mark.parametrize("run", ["local", *KINDS], indirect=True)


def held(run: Folder) -> Claimed:
    made = Claimed(run)
    made.hold(Fence(run, 0).claim)
    return made


@everywhere
def test_the_holder_of_the_claim_changes_the_folder(run: Folder) -> None:
    made = held(run)
    made.write("checkpoints/a/b", [b"b"])
    made.inside("tensorboard").write("c", [b"c"])
    assert made.create("d", b"d")
    made.remove("d")
    assert {name for name in run.files() if not name.startswith("claims/")} == {"checkpoints/a/b", "tensorboard/c"}
    assert (made.read("checkpoints/a/b"), made.where, made.exclusive) == (b"b", run.where, run.exclusive)


@everywhere
def test_without_its_claim_a_holder_changes_nothing(run: Folder) -> None:
    made = held(run)
    run.write("kept", [b"kept"])
    for name in run.files("claims"):
        run.remove(name)
    for change in (
        lambda: made.write("checkpoints/a", [b"a"]),
        lambda: made.inside("tensorboard").write("a", [b"a"]),
        lambda: made.create("a", b"a"),
        lambda: made.remove("kept"),
    ):
        with pytest.raises(FolderGone, match="was moved or removed"):
            change()
    assert set(run.files()) == {"kept"}


@everywhere
def test_a_claim_of_another_run_does_not_count(run: Folder) -> None:
    made = held(run)
    [name] = run.files("claims")
    run.write(name, [b'{"pid": 1}'])
    with pytest.raises(FolderGone, match="belongs to another run"):
        made.write("a", [b"a"])


@everywhere
def test_a_claim_removed_during_a_write_leaves_no_file(run: Folder) -> None:
    made = held(run)
    [claim] = run.files("claims")

    def data() -> Iterator[bytes]:
        yield b"first"
        run.remove(claim)
        yield b"last"

    with pytest.raises(FolderGone):
        made.write("model", data())
    assert not run.files()


def test_a_moved_folder_is_not_created_again(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path / "runs" / "x")
    made = held(run)
    made.write("checkpoints/1/a", [b"a"])
    os.rename(tmp_path / "runs" / "x", tmp_path / "moved")
    for name in ("checkpoints/2/a", "result.json"):
        with pytest.raises(FolderGone):
            made.write(name, [b"a"])
    assert not (tmp_path / "runs" / "x").exists()
    # Nor if it disappears after the check, or together with its storage.
    existing = run.existing()
    for folder in (existing, existing.inside("checkpoints")):
        with pytest.raises(FileNotFoundError):
            folder.write("2/a", [b"a"])
    os.rmdir(tmp_path / "runs")
    with pytest.raises(FileNotFoundError):
        existing.write("a", [b"a"])
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_folder_without_a_claim_can_be_changed_by_anyone(tmp_path: Path) -> None:
    made = Claimed(LocalFolder(tmp_path / "new"))
    made.write("a", [b"a"])
    assert made.claim is None
    with pytest.raises(FolderGone):
        Claimed(LocalFolder(tmp_path / "new"), Claim("claims/1", b"x")).write("a", [b"a"])
