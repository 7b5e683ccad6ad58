"""The headers of pages show which files have page checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.paths.page_checksum import has_checksum, without_checksums
from raytrain_plus.errors import DataError


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("how", [{}, {"compression": "none"}, {"use_dictionary": False}, {"compression": "zstd"}])
@pytest.mark.parametrize("rows", [1, 100_000])
def test_files_with_and_without(tmp_path: Path, how: dict[str, Any], version: str, rows: int) -> None:
    table = pa.table({"x": [value % 7 for value in range(rows)], "y": ["a"] * rows})
    for name, wanted in (("with", True), ("without", False)):
        file = tmp_path / f"{name}.parquet"
        pq.write_table(table, file, write_page_checksum=wanted, data_page_version=version, **how)
    assert without_checksums(sorted(tmp_path.iterdir())) == (tmp_path / "without.parquet",)


def test_a_file_without_rows_has_no_pages_to_check(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    assert without_checksums([tmp_path / "a.parquet"]) == ()


@pytest.mark.parametrize("header", [b"", b"\x15", b"\x15\x00\x15\xff", b"\x00", b"PAR1", b"\x15\x00\x00", b"\x25\x00"])
def test_bytes_that_are_not_a_header(header: bytes) -> None:
    with pytest.raises(ValueError, match="not a page header"):
        has_checksum(header)


def test_a_damaged_header_names_its_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet", use_dictionary=False)
    assert without_checksums([tmp_path / "a.parquet"]) == (tmp_path / "a.parquet",)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4] = 0xFF
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet: cannot read the header of the first page: not a page header"):
        without_checksums([tmp_path / "a.parquet"])
