"""A folder on a file system: written files are whole and durable, or do not exist."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain_plus.errors import InputError, StorageError
from raytrain_plus.storage.folders import local
from raytrain_plus.storage.folders.local import Disk, LocalFolder
from raytrain_plus.storage.folders.open import open_folder
from tests.unit.storage.disk import Full, Linkless, after_every_stop


def test_after_any_stop_a_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    seen: list[bytes] = []

    def check(folder: Path) -> None:
        seen.append(LocalFolder(folder).read("file"))

    calls = after_every_stop(
        folder, lambda disk: LocalFolder(folder, disk).write("file", [b"new ", b"and longer"]), check
    )
    assert set(seen) == {b"old", b"new and longer"}
    assert seen[-3:] == [b"new and longer"] * 3
    assert calls > 6


def test_after_any_stop_a_created_file_is_whole_or_missing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "other").write_bytes(b"stays")
    seen: list[tuple[str, ...]] = []

    def check(folder: Path) -> None:
        run = LocalFolder(folder)
        seen.append(tuple(sorted(run.files())))
        assert run.read("other") == b"stays"
        if "a/b/made" in run.files():
            assert run.read("a/b/made") == b"content"

    after_every_stop(folder, lambda disk: LocalFolder(folder, disk).create("a/b/made", b"content") and None, check)
    assert set(seen) == {("other",), ("a/b/made", "other")}
    # After `create` has returned, the file and its folders exist.
    assert seen[-3:] == [("a/b/made", "other")] * 3


@pytest.mark.parametrize("disk", [Disk(), Linkless()], ids=["links", "no links"])
def test_only_one_of_many_concurrent_creates_succeeds(tmp_path: Path, disk: Disk) -> None:
    ready = threading.Barrier(16)
    made: list[int] = []

    def create(number: int) -> None:
        ready.wait()
        if LocalFolder(tmp_path, disk).create("claim", str(number).encode()):
            made.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert LocalFolder(tmp_path).read("claim") == str(made[0]).encode()
    assert len(made) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["claim"]


def test_without_hard_links_a_failed_create_leaves_no_file(tmp_path: Path) -> None:
    class Failing(Linkless):
        def open(self, path: Path) -> int:
            self.last = path
            return super().open(path)

        def fsync(self, file: int) -> None:
            if self.last.name == "claim":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().fsync(file)

    with pytest.raises(StorageError, match=f"No space left on device: '{tmp_path}/claim'"):
        LocalFolder(tmp_path, Failing()).create("claim", b"mine")
    assert not list(tmp_path.iterdir())
    assert LocalFolder(tmp_path, Linkless()).create("claim", b"mine")


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../up", "a/../../b", "a//b", ".", "a\\b"])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="not a valid name of a file inside"):
        LocalFolder(tmp_path).create(name, b"")


def test_links_to_the_outside_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "run" / "out").symlink_to(tmp_path)
    (tmp_path / "run" / "file").symlink_to(tmp_path / "secret")
    run = LocalFolder(tmp_path / "run")
    for name in ("out/secret", "file", "out/new"):
        for use in (run.read, run.path_of, lambda name: run.write(name, [b"y"])):
            with pytest.raises(InputError, match=f"{name}: a link points outside {tmp_path}/run"):
                use(name)
    assert dict(run.files()) == {}
    assert (tmp_path / "secret").read_text() == "x"


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failed_write_keeps_the_old_file_and_names_it(tmp_path: Path, call: str) -> None:
    LocalFolder(tmp_path).write("run/file", [b"old"])
    run = LocalFolder(tmp_path / "run", Full(call))
    for use in (lambda: run.write("file", [b"new"]), lambda: run.create("file", b"new")):
        with pytest.raises(StorageError, match=f"No space left on device: '{tmp_path}/run/file'") as caught:
            use()
        assert caught.value.errno == errno.ENOSPC
    assert run.read("file") == b"old"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_system_errors_become_storage_errors_that_name_the_file(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path / "run")
    run.write("taken", [b""])
    run.write("folder/file", [b""])
    uses: list[Callable[[], object]] = [
        lambda: run.write("taken/file", [b""]),
        lambda: run.write("folder", [b""]),
        lambda: run.create("taken/file", b""),
        lambda: run.read("folder"),
        lambda: run.read_into("folder", 0, memoryview(bytearray(1))),
        lambda: run.files("taken"),
        lambda: run.remove("taken/file"),
    ]
    for use in uses:
        match = rf"\[Errno \d+\] .*directory: '{tmp_path}/run/(taken|folder|\.folder)"
        with pytest.raises(StorageError, match=match) as caught:
            use()
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_parts_of_files_are_read(tmp_path: Path) -> None:
    run = open_folder(tmp_path / "run")
    run.write("sub/file", [bytes(range(100))])
    into = bytearray(10)
    run.read_into("sub/file", 20, memoryview(into))
    assert into == bytes(range(20, 30))
    with pytest.raises(OSError, match="ends after 100 bytes; 105 are needed"):
        run.read_into("sub/file", 95, memoryview(into))
    with pytest.raises(FileNotFoundError):
        run.read("nothing")
    inside = run.inside("sub")
    assert list(inside.files()) == ["file"]
    assert run.files("sub")["sub/file"].bytes == 100
    assert dict(run.files("nothing")) == {}
    run.remove("sub")
    run.remove("sub")
    assert dict(run.files()) == {}


def test_a_large_file_reaches_the_disk_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise all of it waits in memory for the last fsync, and nobody sees how far the disk is.
    monkeypatch.setattr(local, "SYNC_BYTES", 4)
    written, synced = [0], list[int]()

    class Recording(Disk):
        def write(self, file: int, data: memoryview) -> int:
            written[0] += len(data)
            return super().write(file, data)

        def fsync(self, file: int) -> None:
            synced.append(written[0])

    LocalFolder(tmp_path, Recording()).write("file", [b"0123456", b"789"])
    assert synced == [4, 10]
    assert LocalFolder(tmp_path).read("file") == b"0123456789"
