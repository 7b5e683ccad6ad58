"""Folders that pyarrow reaches: HDFS, for which a folder of this machine stands in."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from raytrain_plus.errors import InputError
from raytrain_plus.storage.folders.hdfs import HdfsFolder
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.folders.open import open_folder


def test_closing_a_pyarrow_stream_completes_the_file(tmp_path: Path) -> None:
    """The behaviour of pyarrow because of which incomplete files are never closed under their own name."""

    def write() -> None:
        with fs.LocalFileSystem().open_output_stream(str(tmp_path / "half")) as stream:
            stream.write(b"half of it")
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write()
    assert (tmp_path / "half").read_bytes() == b"half of it"


def test_a_file_is_written_under_another_name_first(tmp_path: Path) -> None:
    folder = HdfsFolder(fs.LocalFileSystem(), str(tmp_path), "hdfs://host/runs")
    before: list[set[str]] = []

    def data() -> Iterator[bytes]:
        yield b"half"
        before.append({path.name for path in (tmp_path / "a").iterdir()})

    folder.write("a/file", data())
    assert [name.startswith(".file.") and name.endswith(".part") for name in before[0]] == [True]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]
    assert not folder.exclusive


def test_an_existing_file_of_the_same_bytes_counts_as_created(tmp_path: Path) -> None:
    folder = HdfsFolder(fs.LocalFileSystem(), str(tmp_path), "hdfs://host/runs")
    assert folder.create("claim", b"mine")
    assert not folder.create("claim", b"yours")
    assert folder.create("claim", b"mine")


def test_errors_show_no_credentials() -> None:
    """The environment may name a proxy or an endpoint with a password in its address."""
    folder = HdfsFolder(Telling(), "runs", "hdfs://host/runs")
    with pytest.raises(OSError, match=r"could not be listed: no answer from http://\*\*\*@proxy") as caught:
        folder.files()
    assert "pa55" not in "".join(traceback.format_exception(caught.value))


class Telling:
    """A file system whose errors repeat an address."""

    type_name = "hdfs"

    def get_file_info(self, wanted: object) -> None:
        raise OSError("no answer from http://me:pa55word@proxy:80/runs")


@pytest.mark.parametrize("where", ["hdfs:///runs", "hdfs://host:8020/runs?user=me"])
def test_an_address_is_shown_without_settings(where: str) -> None:
    assert HdfsFolder(fs.LocalFileSystem(), "runs", where).where == where.partition("?")[0]


@pytest.mark.parametrize("where", ["ftp://host/runs", "https://host/runs"])
def test_an_address_of_another_kind_is_an_input_error(where: str) -> None:
    with pytest.raises(InputError, match="Unrecognized filesystem type") as caught:
        open_folder(where)
    assert caught.value.where == where


def test_a_path_in_the_form_of_an_address_is_a_local_folder(tmp_path: Path) -> None:
    folder = open_folder(f"file://{tmp_path}/runs")
    assert isinstance(folder, LocalFolder)
    assert folder.where == f"{tmp_path}/runs"
