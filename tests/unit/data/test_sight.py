"""The description of a file that has changed since it was first seen."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.paths.sight import Sight, change_of, footer_of, sight_of

AN_HOUR_NS = 3600 * 10**9


def write(file: Path, labels: list[int], statistics: bool = False) -> None:
    """Write a file whose size and footer do not depend on the labels; with `statistics`, the footer does."""
    pq.write_table(pa.table({"y": labels}), file, compression="none", use_dictionary=False, write_statistics=statistics)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "a.parquet", [1, 2, 3])
    then = (tmp_path / "a.parquet").stat().st_mtime_ns - AN_HOUR_NS
    os.utime(tmp_path / "a.parquet", ns=(then, then))
    return tmp_path / "a.parquet"


def seen(file: Path) -> tuple[Sight, str]:
    return sight_of(file), hashlib.sha256(footer_of(file)).hexdigest()


def test_an_unchanged_file_costs_one_stat(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, footer = seen(file)
    looks: list[Path] = []
    looked = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path: looks.append(path) or looked(path))
    monkeypatch.setattr(Path, "open", lambda path, mode: pytest.fail("it was opened"))
    assert change_of(file, first, footer) == ""
    assert looks == [file]


def test_other_values_of_the_same_size_in_the_same_place(file: Path) -> None:
    first, footer = seen(file)
    with file.open("r+b") as opened:
        write(opened, [2, 3, 4])  # type: ignore[arg-type]
    assert (sight_of(file).size, sight_of(file).inode) == (first.size, first.inode)
    told = change_of(file, first, footer)
    assert told.startswith("its modification time changed: 20")
    assert " UTC -> 20" in told


def test_another_file_of_the_same_size_under_the_same_name(file: Path) -> None:
    first, footer = seen(file)
    write(file.with_suffix(".new"), [2, 3, 4])
    file.with_suffix(".new").replace(file)
    assert change_of(file, first, footer).startswith("its modification time changed")


def test_another_footer(file: Path) -> None:
    write(file, [1, 2, 3], statistics=True)
    first, footer = seen(file)
    write(file, [2, 3, 4], statistics=True)
    assert sight_of(file).size == first.size
    assert change_of(file, first, footer).startswith("its footer changed: 20")


def test_another_footer_is_found_though_the_modification_time_was_restored(file: Path) -> None:
    write(file, [1, 2, 3], statistics=True)
    first, footer = seen(file)
    write(file, [2, 3, 4], statistics=True)
    os.utime(file, ns=(first.modified_ns, first.modified_ns))
    assert change_of(file, first, footer) == "its footer changed"


def test_another_size(file: Path) -> None:
    first, footer = seen(file)
    with file.open("ab") as opened:
        opened.write(bytes(1000))
    assert change_of(file, first, footer) == f"its size changed: {first.size:,} -> {first.size + 1000:,} bytes"


def test_a_file_that_was_removed(file: Path) -> None:
    first, footer = seen(file)
    file.unlink()
    assert change_of(file, first, footer) == "it was removed"


def test_a_copy_that_keeps_the_modification_time_is_the_same_data(file: Path) -> None:
    first, footer = seen(file)
    shutil.copy2(file, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)
    file.chmod(0o600)
    assert sight_of(file) != first
    assert change_of(file, first, footer) == ""
