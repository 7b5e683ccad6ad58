"""A user sees what a run would read before it reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raytrain_plus import Task
from raytrain_plus.checks.data_report import data_report
from raytrain_plus.errors import DataError
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Job


def job(path: Path, **data: Any) -> Job:
    return Job(name="x", task=Task, data=Data(path=str(path), batch_size=8, shards=4, **data), steps=2)


def test_rows_columns_and_values_are_shown(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    tokens = [list(range(n % 5)) for n in range(100)]
    table = pa.table({"tokens": pa.array(tokens), "label": [*range(99), None], "text": ["a" * 60] * 100})
    pq.write_table(table.slice(0, 60), tmp_path / "data" / "a.parquet", row_group_size=20)
    pq.write_table(table.slice(60), tmp_path / "data" / "b.parquet", row_group_size=40, write_page_checksum=True)
    found = data_report(job(tmp_path / "data"), [])
    assert (found.rows, found.row_groups, found.fewest, found.most, found.files) == (100, 4, 20, 40, 2)
    assert found.without_checksums == (str(tmp_path / "data" / "a.parquet"),)
    assert found.read_factor == pytest.approx(7 / 4)
    by_name = {one.name: one for one in found.columns}
    assert (by_name["tokens"].items, by_name["tokens"].longest) == (pytest.approx(2.0), 4)
    assert (by_name["label"].nulls, by_name["label"].values) == (1, ("0", "1", "2"))
    said = found.lines()
    assert said[0].startswith(f"{tmp_path}/data: 100 rows, ")
    assert said[1] == "  4 row groups of 20 to 40 rows in 2 files"
    assert said[2] == "  tokens  list<element: int64>  [], [0], [0, 1]; 2.0 items on average, at most 4, 200 in all"
    assert said[3] == "  label   int64                 0, 1, 2; 1 null in 100 rows"
    assert said[4].endswith(f"'{'a' * 36}...")
    assert said[5] == "  workers keep the row groups in memory once they are read (data.cache_mb)"
    assert said[6] == "  1 file has no page checksums"
    read_again = data_report(job(tmp_path / "data", cache_mb=0), [])
    assert (found.kept, read_again.kept) == (True, False)
    assert read_again.lines()[5].startswith("  an epoch reads each row group 1.75 times: ")
    assert found.to_json()["columns"][1]["nulls"] == 1


def test_converted_data_is_named_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "rows.csv").write_text("a,b\n" + "1,x\n" * 20)
    found = data_report(job(tmp_path / "rows.csv"), [])
    assert found.path == str(tmp_path / "rows.csv")
    assert found.converted is not None
    assert found.converted.startswith(str(tmp_path / "home" / ".cache" / "raytrain_plus" / "data" / "rows-"))
    assert found.lines()[1] == f"  converted to Parquet in {found.converted}"


def test_the_folders_of_images_are_named_in_the_order_of_their_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for number in range(12):
        folder = tmp_path / "pictures" / f"kind{number:02}"
        folder.mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / "a.png")
    found = data_report(job(tmp_path / "pictures", image_size=(4, 4)), [])
    assert found.classes[:2] == ("kind00", "kind01")
    (line,) = (line for line in found.lines() if "labels" in line)
    assert line.startswith("  labels are the folders: 0 kind00, 1 kind01, ")
    assert line.endswith("9 kind09, ... 11 kind11")
    assert not found.kept, "images are decoded after they are read"


def test_data_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        data_report(job(tmp_path / "none.csv"), [])
