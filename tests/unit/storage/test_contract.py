"""Every kind of folder keeps the contract."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pyarrow import fs

from raytrain_plus.errors import FolderGone, InputError
from raytrain_plus.runs.folder import Fence, single_writer
from raytrain_plus.storage.address import within
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.folders.hdfs import HdfsFolder
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from tests.unit.storage.store import KINDS


@pytest.fixture(params=["local", *KINDS, "mounted"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An empty folder; `mounted` is one that pyarrow reaches and that is not an object store."""
    if request.param == "local":
        return LocalFolder(tmp_path / "run")
    if request.param == "mounted":
        return HdfsFolder(fs.LocalFileSystem(), str(tmp_path / "run"), f"mounted://{tmp_path}/run")
    bucket_of: Callable[[str], Folder] = request.getfixturevalue("bucket_of")
    return bucket_of(request.param).inside(tmp_path.name)


def test_written_bytes_are_read_back(folder: Folder) -> None:
    folder.write("deep/er/file", [b"one ", bytearray(b"two "), memoryview(b"three"), np.arange(2, dtype=np.uint8)])
    assert folder.read("deep/er/file") == b"one two three\x00\x01"


@pytest.mark.parametrize("name", ["a b", "50%", "a+b", "%20", "ü/€", "x=1&y", "a#b", "a?b", "'q'", "~a", "a*[b]"])
def test_names_have_any_characters(folder: Folder, name: str) -> None:
    folder.inside(name).write(name, [name.encode()])
    assert folder.inside(name).read(name) == name.encode()
    assert set(folder.files()) == {f"{name}/{name}"}
    assert set(folder.inside(name).files()) == {name}
    assert not folder.inside(name).create(name, b"another")
    folder.remove(name)
    assert folder.files() == {}


def test_a_later_write_replaces_an_earlier_one(folder: Folder) -> None:
    folder.write("file", [b"a longer one"])
    folder.write("file", [b"short"])
    assert folder.read("file") == b"short"
    assert {name: stat.bytes for name, stat in folder.files().items()} == {"file": 5}


def test_an_empty_file_is_a_file(folder: Folder) -> None:
    folder.write("empty", [])
    assert folder.read("empty") == b""
    assert folder.files()["empty"].bytes == 0


def test_a_created_file_is_not_replaced(folder: Folder) -> None:
    assert folder.create("claims/1", b"mine")
    assert not folder.create("claims/1", b"yours")
    assert folder.read("claims/1") == b"mine"


def test_an_existing_file_of_the_same_bytes_counts_as_created(folder: Folder) -> None:
    """An answer may get lost after the object was put."""
    if folder.path is not None:
        pytest.skip("no answer gets lost on a file system of this machine")
    assert folder.create("claims/1", b"mine")
    assert folder.create("claims/1", b"mine")


def test_of_two_concurrent_creates_one_succeeds(folder: Folder) -> None:
    if not folder.exclusive:
        pytest.skip("makes no such promise")
    start = threading.Barrier(2, timeout=30)

    def create(number: int, who: bytes) -> bool:
        start.wait()
        return folder.create(f"claim-{number}", who)

    with ThreadPoolExecutor(2) as pool:
        for number in range(10):
            first, second = pool.map(create, (number, number), (b"first", b"second"))
            assert first != second
            assert folder.read(f"claim-{number}") == (b"first" if first else b"second")


def test_a_second_controller_is_refused(folder: Folder) -> None:
    """On Google's and Azure's stores this was a look and then a write, with room for another between them."""
    run = folder.inside("run")
    first = Fence(run, 0)
    assert single_writer(run) == run.exclusive
    with pytest.raises(InputError, match="another run with this name has started"):
        Fence(run, 0)
    assert first.overtaken() is None
    # Of two that resume at once, one is refused, too, and both find out about the other.
    second = Fence(run, 1)
    with pytest.raises(InputError, match="another run with this name has started"):
        Fence(run, 1)
    assert first.overtaken() is not None
    assert second.overtaken() is None
    held = Claimed(run, second.claim)
    held.write("kept", [b"kept"])
    run.write(second.claim.name, [b"{}"])
    with pytest.raises(FolderGone):
        held.write("late", [b"late"])


def test_a_range_fills_the_memory_given(folder: Folder) -> None:
    folder.write("file", [bytes(range(100))])
    into = np.zeros(10, np.uint8)
    folder.read_into("file", 90, into.data)
    assert into.tolist() == list(range(90, 100))
    folder.read_into("file", 100, memoryview(bytearray()))


@pytest.mark.parametrize("start", [91, 100, 1000])
def test_a_file_shorter_than_the_range_is_an_error(folder: Folder, start: int) -> None:
    folder.write("file", [bytes(100)])
    with pytest.raises(OSError, match=r"file.* ends after"):
        folder.read_into("file", start, memoryview(bytearray(10)))


def test_missing_files_are_reported(folder: Folder) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        folder.read("nothing")
    with pytest.raises(FileNotFoundError, match="nothing"):
        folder.read_into("nothing", 0, memoryview(bytearray(1)))
    folder.write("file", [b"x"])
    with pytest.raises(FileNotFoundError, match="below"):
        folder.read("file/below")
    folder.remove("file")
    assert folder.files() == {}
    assert folder.files("nothing") == {}
    folder.remove("nothing")


def test_files_are_found_however_deep(folder: Folder) -> None:
    for name in ("top", "a/one", "a/b/two", "ab/three"):
        folder.write(name, [name.encode()])
    assert set(folder.files()) == {"top", "a/one", "a/b/two", "ab/three"}
    assert set(folder.files("a")) == {"a/one", "a/b/two"}
    stat = folder.files("a")["a/b/two"]
    assert stat.bytes == len("a/b/two")
    assert stat.time > 1.7e9


def test_unfinished_files_are_listed_apart_and_can_be_removed(folder: Folder) -> None:
    for name in ("top", ".top.0a1b.part", "a/.one.2c3d.part"):
        folder.write(name, [b"xyz"])
    assert set(folder.files()) == {"top"}
    assert {name: stat.bytes for name, stat in folder.unfinished().items()} == {
        ".top.0a1b.part": 3,
        "a/.one.2c3d.part": 3,
    }
    assert set(folder.unfinished("a")) == {"a/.one.2c3d.part"}
    assert folder.unfinished("nothing") == {}
    folder.remove(".top.0a1b.part")
    folder.remove("a")
    assert folder.unfinished() == {}


def test_a_file_or_everything_under_a_folder_is_removed(folder: Folder) -> None:
    for name in ("top", "a/one", "a/b/two", "ab/three"):
        folder.write(name, [b"x"])
    folder.remove("a")
    folder.remove("top")
    assert set(folder.files()) == {"ab/three"}


def test_a_folder_is_renamed(folder: Folder) -> None:
    run = folder.inside("run")
    run.write("a/one", [b"1"])
    run.write("two", [b"2"])
    folder.write("runner", [b"another one's"])
    run.move("run.old")
    assert set(folder.files()) == {"run.old/a/one", "run.old/two", "runner"}
    assert folder.inside("run.old").read("a/one") == b"1"


def test_a_folder_never_replaces_another(folder: Folder) -> None:
    for run in ("run", "run.old"):
        folder.inside(run).write("file", [run.encode()])
    with pytest.raises(FileExistsError, match=r"run\.old"):
        folder.inside("run").move("run.old")
    assert folder.read("run/file") == b"run"
    assert folder.read("run.old/file") == b"run.old"


def test_a_folder_inside_is_a_folder(folder: Folder) -> None:
    inside = folder.inside("a").inside("b")
    assert inside.create("file", b"x")
    assert folder.read("a/b/file") == b"x"
    assert set(inside.files()) == {"file"}
    assert inside.where == f"{folder.where}/a/b"
    assert inside.address == within(within(folder.address, "a"), "b")


def test_an_address_leads_to_the_same_folder(folder: Folder, request: pytest.FixtureRequest) -> None:
    if "mounted" in request.node.name:
        pytest.skip("a stand-in without an address")
    folder.inside("a").write("file", [b"x"])
    again = open_folder(folder.inside("a").address)
    assert again.read("file") == b"x"
    assert (again.where, again.address, again.path) == (f"{folder.where}/a", folder.inside("a").address, again.path)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../file", "a/../b", "a//b", "./a", "a/"])
def test_names_outside_the_folder_are_refused(folder: Folder, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: folder.write(name, [b""]),
        lambda: folder.create(name, b""),
        lambda: folder.read(name),
        lambda: folder.remove(name),
        lambda: folder.inside(name),
        lambda: folder.move(name),
    ]
    for call in calls:
        with pytest.raises(InputError, match="not a valid name"):
            call()


def test_half_a_write_changes_nothing(folder: Folder) -> None:
    def half(size: int) -> Iterator[bytes]:
        yield bytes(size)
        raise ValueError("no more")

    folder.write("file", [b"whole"])
    for size in (10, 20_000_000):
        with pytest.raises(ValueError, match="no more"):
            folder.write("file", half(size))
        with pytest.raises(ValueError, match="no more"):
            folder.write("new", half(size))
    assert folder.read("file") == b"whole"
    assert set(folder.files()) == {"file"}
