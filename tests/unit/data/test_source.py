"""Indexing reads units, columns and the fingerprint, and refuses bad data with the place and the remedy."""

import os
import pickle
import random
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.sources.alike import check_alike
from raytrain_plus.data.sources.parquet_source import check_restored, check_unchanged, parquet_source
from raytrain_plus.data.sources.source import Source, check_enough
from raytrain_plus.errors import DataChanged, DataError
from tests.support.datasets import write


def write_checked(path: Path, rows: int, **how: Any) -> Path:
    """Write points and labels in row groups of 10, with page checksums."""
    rng = np.random.default_rng(0)
    points = pa.FixedSizeListArray.from_arrays(pa.array(rng.normal(size=6 * rows).astype("float32")), 6)
    table = pa.table({"x": points, "y": pa.array(rng.integers(0, 3, rows))})
    pq.write_table(table, path, row_group_size=10, write_page_checksum=True, **how)
    return path


def test_units_come_file_by_file_and_group_by_group(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", 5, 100)
    write(tmp_path / "a" / "z.parquet", 9)
    write(tmp_path / "_temporary" / "c.parquet", 9)
    (tmp_path / "notes.txt").write_text("no data")
    seen = parquet_source(tmp_path)
    assert seen.files == ("a/z.parquet", "b.parquet")
    assert seen.unit_rows == (4, 4, 1, 4, 1)
    assert seen.rows == 14
    assert seen.read_unit(3).column("x").to_pylist() == [100, 101, 102, 103]


def test_one_file_is_a_dataset(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", 5, 100)
    assert parquet_source(tmp_path / "b.parquet").read_unit(1).column("x").to_pylist() == [104]


def test_held_out_data_with_other_columns_is_told_apart(tmp_path: Path) -> None:
    tables = {
        "seen": pa.table({"a": [1], "b": ["x"]}),
        "typed": pa.table({"a": [0.5], "b": ["x"]}),
        "turned": pa.table({"b": ["x"], "a": [1]}),
        "named": pa.table({"a": [1], "c": ["x"]}),
    }
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
    made = {name: parquet_source(tmp_path / f"{name}.parquet") for name in tables}
    check_alike(made["seen"], made["seen"])
    for name, words in (("typed", "'a' is double, not int64"), ("turned", "their order is b, a"), ("named", "b, c")):
        with pytest.raises(DataError) as caught:
            check_alike(made["seen"], made[name])
        assert caught.value.what.endswith(f"than the training data: {words}")


def test_the_fingerprint_knows_content_but_no_place_and_no_time(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder / "a.parquet", 9)
    assert parquet_source(tmp_path / "one").fingerprint == parquet_source(tmp_path / "two").fingerprint
    write(tmp_path / "two" / "a.parquet", 9, start=1)
    assert parquet_source(tmp_path / "one").fingerprint != parquet_source(tmp_path / "two").fingerprint


def failure(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        parquet_source(path)
    return str(caught.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    text = failure(tmp_path / "nowhere")
    assert "nowhere: there is no such file or folder" in text
    assert "data.prepare" in text


def test_a_folder_without_parquet_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    assert "contains no Parquet files; found 1 .csv" in failure(tmp_path)


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
    with pytest.raises(DataError, match=r"b.parquet: column 'x' cannot hold nulls(.|\n)*a column that can hold nulls"):
        parquet_source(tmp_path)


def test_repeated_values_count_with_their_decoded_size(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [7] * 100_000, "y": [[1.0, 2.0]] * 100_000}), tmp_path / "a.parquet")
    assert parquet_source(tmp_path).unit_bytes[0] >= 100_000 * 8


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **settings: Any) -> Any:
        if path.name == "a.parquet":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **settings)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: permission denied"):
        parquet_source(tmp_path)


def forbid(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Make `path` inaccessible, as in a folder without search permission; root would ignore a mode."""
    looked = Path.stat

    def stat(at: Path, **settings: Any) -> Any:
        if at == path:
            raise PermissionError(13, "Permission denied", str(at))
        return looked(at, **settings)

    monkeypatch.setattr(Path, "stat", stat)


def test_a_path_that_cannot_be_accessed_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 300)
    assert failure(long) == f"{long}: cannot be accessed: File name too long"
    assert "cannot be accessed: embedded null byte" in failure(tmp_path / "a\0b")
    forbid(monkeypatch, tmp_path / "closed" / "data")
    assert failure(tmp_path / "closed" / "data").endswith("closed/data: cannot be accessed: Permission denied")


def test_a_file_that_cannot_be_accessed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", 3)
    forbid(monkeypatch, tmp_path / "a.parquet")
    assert failure(tmp_path).endswith("a.parquet: cannot be accessed: Permission denied")


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
        parquet_source(tmp_path)


def test_a_missing_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 3, y=pa.array([1, 2, 3]))
    write(tmp_path / "b.parquet", 3)
    assert "column 'y' is missing" in failure(tmp_path)


def test_a_corrupt_file_is_named_with_its_size(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 9)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 is not enough")
    assert "b.parquet: is not a readable Parquet file (18 bytes)" in failure(tmp_path)


def rot(file: Path, at: int, damage: bytes) -> None:
    """Damage bytes as a failing disk does: `stat` stays the same."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(damage)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_corrupt_row_group_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 4000, group=4000)
    seen = parquet_source(tmp_path)
    rot(tmp_path / "a.parquet", 4, b"\xff" * 396)
    with pytest.raises(DataError, match="row group 0: cannot be read"):
        seen.read_unit(0)


def flip(file: Path, at: int, bit: int) -> None:
    rot(file, at, bytes([file.read_bytes()[at] ^ 1 << bit]))


def pages(file: Path) -> list[tuple[int, int, int, str]]:
    """Return (row group, start of the header, end of the page, column) of each page; each chunk has one page."""
    found = []
    metadata = pq.read_metadata(file)
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(number)
            name = chunk.path_in_schema.partition(".")[0]
            starts = [start for start in (chunk.dictionary_page_offset, chunk.data_page_offset) if start is not None]
            end = starts[0] + chunk.total_compressed_size
            found += [(group, *span, name) for span in zip(starts, [*starts[1:], end], strict=True)]
    return found


def fault(seen: Source, unit: int) -> str:
    """Return the error of reading a unit; empty if it can be read."""
    try:
        seen.read_unit(unit)
    except DataChanged as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", [{}, {"compression": "none"}, {"use_dictionary": False}, {"data_page_version": "2.0"}])
def test_a_flipped_bit_in_any_page_of_sixty_files_is_found(tmp_path: Path, how: dict[str, Any]) -> None:
    rng = random.Random(str(how))
    for number in range(60):
        write_checked(tmp_path / f"{number}.parquet", 20, **how)
    seen, missed = parquet_source(tmp_path), []
    told = "row group {}, column '{}' on \\S+: the page checksum does not match: the file is damaged"
    assert len(seen.unit_rows) == 120
    for number in range(len(seen.files)):
        group, _, end, column = rng.choice(pages(seen.file(number)))
        # A header's statistics are not values, and the checksum does not cover them.
        flip(seen.file(number), end - 1 - rng.randrange(8), rng.randrange(8))
        found = fault(seen, 2 * number + group)
        if not re.search(f"{seen.file(number)}, {told.format(group, column)}", found):
            missed.append(f"{seen.name(2 * number + group)}: {found}")
        # The other row group is undamaged.
        assert seen.read_unit(2 * number + 1 - group).num_rows == 10
    assert not missed


@pytest.mark.parametrize("bits", [range(1, 2), pytest.param(range(8), marks=pytest.mark.slow)])
def test_no_flipped_bit_in_a_pages_header_gives_other_rows(tmp_path: Path, bits: range) -> None:
    file = write_checked(tmp_path / "a.parquet", 10)
    seen = parquet_source(tmp_path)
    whole, data = seen.read_unit(0), file.read_bytes()
    times = file.stat().st_mtime_ns
    found = 0
    for _, start, end, _ in pages(file):
        for at in range(start, min(start + 40, end)):
            for bit in bits:
                file.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
                os.utime(file, ns=(times, times))
                try:
                    # For example statistics, which nothing reads.
                    assert seen.read_unit(0).equals(whole)
                except DataError as error:
                    found += "changed" not in str(error)
    assert found > 50 * len(bits)


def test_a_file_that_changed_before_or_after_it_was_read_is_named(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.parquet", 4)
    seen = parquet_source(tmp_path)
    assert seen.read_unit(1).num_rows == 4
    os.utime(tmp_path / "b.parquet", (1, 1))
    assert seen.read_unit(0).num_rows == 4
    told = r"b\.parquet on \S+: the file changed while the run used it: its modification time changed: 20.* -> 1970-"
    for look in (lambda: seen.read_unit(1), lambda: check_unchanged(seen)):
        with pytest.raises(DataChanged, match=told):
            look()
    seen.check_unchanged(0)
    # A process that first sees the file now finds no change.
    check_unchanged(parquet_source(tmp_path))


def test_a_changed_file_is_refused_until_it_is_restored(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write(file, 4)
    seen, before = parquet_source(tmp_path), file.stat().st_mtime_ns
    os.utime(file, (1, 1))
    with pytest.raises(DataChanged) as caught:
        check_unchanged(seen)
    first = pickle.loads(pickle.dumps(caught.value)).first
    with pytest.raises(DataError, match="and has not been restored: its modification time changed") as refused:
        check_restored(parquet_source(tmp_path), first)
    check_restored(seen, {**first, "path": "/elsewhere"})
    [command] = re.findall("`(touch .*)`", refused.value.remedy)
    subprocess.run(shlex.split(command), check=True)
    assert file.stat().st_mtime_ns == before
    check_restored(parquet_source(tmp_path), first)


def test_a_change_is_reported_rather_than_the_read_error_that_it_causes(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 4)
    seen = parquet_source(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"no Parquet")
    with pytest.raises(DataChanged, match=r"its size changed: \d+ -> 10 bytes"):
        seen.read_unit(0)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(DataChanged, match="it was removed"):
        seen.read_unit(0)


def test_data_that_each_node_wrote_for_itself_is_the_same_data(tmp_path: Path) -> None:
    for node in ("one", "two"):
        write(tmp_path / node / "a.parquet", 9)
    os.utime(tmp_path / "two" / "a.parquet", (1, 1))
    one, two = parquet_source(tmp_path / "one"), parquet_source(tmp_path / "two")
    assert one.sights != two.sights
    assert one.fingerprint == two.fingerprint
    assert one.read_unit(0).equals(two.read_unit(0))


def test_fewer_rows_than_shards(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 5)
    with pytest.raises(DataError, match=r"the data has 5 rows, fewer than data\.shards = 8"):
        check_enough(parquet_source(tmp_path), 8)
