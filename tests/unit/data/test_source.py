"""What one pass over the footers finds, and what it refuses, with the place and the remedy."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.source import check_enough, index, read_unit
from raytrain_plus.errors import DataError


def write(path: Path, rows: int, start: int = 0, group: int = 4, **columns: pa.Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"x": pa.array(range(start, start + rows), pa.int64()), **columns})
    pq.write_table(table, path, row_group_size=group)


def test_units_come_file_by_file_and_group_by_group(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", 5, 100)
    write(tmp_path / "a" / "z.parquet", 9)
    write(tmp_path / "_temporary" / "c.parquet", 9)
    (tmp_path / "notes.txt").write_text("no data")
    seen = index(tmp_path)
    assert seen.files == ("a/z.parquet", "b.parquet")
    assert seen.unit_rows == (4, 4, 1, 4, 1)
    assert seen.rows == 14
    assert read_unit(seen, 3).column("x").to_pylist() == [100, 101, 102, 103]


def test_one_file_is_a_dataset(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", 5, 100)
    assert read_unit(index(tmp_path / "b.parquet"), 1).column("x").to_pylist() == [104]


def test_the_fingerprint_knows_content_but_no_place_and_no_time(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder / "a.parquet", 9)
    assert index(tmp_path / "one").fingerprint == index(tmp_path / "two").fingerprint
    write(tmp_path / "two" / "a.parquet", 9, start=1)
    assert index(tmp_path / "one").fingerprint != index(tmp_path / "two").fingerprint


def failure(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        index(path)
    return str(caught.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    text = failure(tmp_path / "nowhere")
    assert "nowhere: there is no such file or folder" in text
    assert "data.prepare" in text


def test_a_folder_without_parquet_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    assert "holds no Parquet file, but 1 .csv" in failure(tmp_path)


def test_an_empty_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0)
    write(tmp_path / "b.parquet", 0)
    assert "0 rows in 2 files" in failure(tmp_path)


def test_schemas_that_differ_name_file_and_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 3, y=pa.array([1, 2, 3]))
    write(tmp_path / "b.parquet", 3, y=pa.array(["1", "2", "3"]))
    text = failure(tmp_path)
    assert "b.parquet: column 'y' is string; 1 of 2 files differ" in text
    assert "int64, as in" in text


def test_columns_of_which_only_one_can_hold_nulls(tmp_path: Path) -> None:
    for name, nullable in (("a", True), ("b", False)):
        schema = pa.schema([pa.field("x", pa.int64(), nullable=nullable)])
        pq.write_table(pa.table({"x": [1]}, schema=schema), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"b.parquet: column 'x' cannot hold nulls(.|\n)*one that can hold nulls"):
        index(tmp_path)


def test_what_repeats_is_counted_as_it_is_decoded(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [7] * 100_000, "y": [[1.0, 2.0]] * 100_000}), tmp_path / "a.parquet")
    assert index(tmp_path).unit_bytes[0] >= 100_000 * 8


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **settings: Any) -> Any:
        if path.name == "a.parquet":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **settings)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: permission denied"):
        index(tmp_path)


def forbid(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """As if `path` lay in a folder that may not be searched; tests may run as root, whom no mode stops."""
    looked = Path.stat

    def stat(at: Path, **settings: Any) -> Any:
        if at == path:
            raise PermissionError(13, "Permission denied", str(at))
        return looked(at, **settings)

    monkeypatch.setattr(Path, "stat", stat)


def test_a_path_that_cannot_be_looked_at_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 300)
    assert failure(long) == f"{long}: cannot be looked at: File name too long"
    assert "cannot be looked at: embedded null byte" in failure(tmp_path / "a\0b")
    forbid(monkeypatch, tmp_path / "closed" / "data")
    assert failure(tmp_path / "closed" / "data").endswith("closed/data: cannot be looked at: Permission denied")


def test_a_file_that_cannot_be_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", 3)
    forbid(monkeypatch, tmp_path / "a.parquet")
    assert failure(tmp_path).endswith("a.parquet: cannot be looked at: Permission denied")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    closed = tmp_path / "closed"
    closed.mkdir()
    listed = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(closed))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(
        DataError, match=r"closed.*cannot be listed: Permission denied|cannot be listed: Permission.*closed"
    ):
        index(tmp_path)


def test_a_missing_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 3, y=pa.array([1, 2, 3]))
    write(tmp_path / "b.parquet", 3)
    assert "column 'y' is missing" in failure(tmp_path)


def test_a_corrupt_file_is_named_with_its_size(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 9)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 is not enough")
    assert "b.parquet: is no readable Parquet file (18 bytes)" in failure(tmp_path)


def test_a_corrupt_row_group_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 4000, group=4000)
    seen = index(tmp_path)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:400] = b"\xff" * 396
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(DataError, match="row group 0: cannot be read"):
        read_unit(seen, 0)


def test_fewer_rows_than_shards(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 5)
    with pytest.raises(DataError, match=r"5 rows are fewer than data\.shards = 8"):
        check_enough(index(tmp_path), 8)
