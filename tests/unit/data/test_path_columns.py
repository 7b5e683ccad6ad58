"""The names of folders become columns, as pyarrow's dataset has them; a file's own column must agree with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.dataset import training_data
from raytrain_plus.data.paths.path_columns import NOTHING
from raytrain_plus.data.reading.transform_block import without_ids
from raytrain_plus.data.sources.mixed_source import mixed
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.errors import DataError
from tests.support.read_types import job, read


def write(root: Path, *folders: str, **columns: Any) -> Path:
    for number, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        pq.write_table(pa.table({"x": [number, number + 10], **columns}), root / folder / "part-0.parquet")
    return root


@pytest.mark.parametrize(
    ("folders", "columns"),
    [
        (("year=2023/month=1", "year=2024/month=02"), ["x", "year", "month"]),
        (("lang=de", "lang=a%20b"), ["x", "lang"]),
        (("code=7", "code=x7"), ["x", "code"]),
        ((f"year={NOTHING}", "year=2024"), ["x", "year"]),
    ],
)
def test_columns_and_types_are_those_of_pyarrow(tmp_path: Path, folders: tuple[str, ...], columns: list[str]) -> None:
    root = write(tmp_path / "data", *folders)
    found = training_data(job(root, columns=columns), [])
    expected = ds.dataset(root, partitioning="hive").to_table().sort_by("x")
    assert found.schema == expected.schema
    rows = pa.concat_tables([without_ids(found.read_unit(unit)) for unit in range(2)]).sort_by("x")
    assert rows.to_pydict() == expected.to_pydict()


def test_folders_with_other_keys_are_said_to_be_no_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path / "data", "year=2023", "year=2024", "more")
    assert training_data(job(root), []).schema.names == ["x"]
    said = "values in the names of folders are not read, because more/part-0.parquet lacks some"
    assert said in capsys.readouterr().err
    assert training_data(job(root / "more"), []).schema.names == ["x"]
    assert capsys.readouterr().err == ""


def test_numbers_are_read_and_text_is_if_somebody_can_use_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "data", "lang=de/year=2024", "lang=fr/year=2025")
    assert training_data(job(root), []).schema.names == ["x", "year"]
    assert (
        "lang, in the names of folders, is text and not read, unless data.columns names it" in capsys.readouterr().err
    )
    assert training_data(job(root, collate="pad"), []).schema.names == ["x", "lang", "year"]
    assert training_data(job(root, columns=["x"]), []).schema.names == ["x"]
    assert read(training_data(job(root, columns=["lang", "x"]), [])) == {"lang": ["de", "de"], "x": [0, 10]}
    assert capsys.readouterr().err == ""
    # A run of an older version goes on without.
    assert training_data(job(root), [], older=True).schema.names == ["x"]
    assert read(training_data(job(root), [], older=True)) == {"x": [0, 10]}


def test_a_file_that_has_the_column_too_must_agree(tmp_path: Path) -> None:
    same = write(tmp_path / "same", "year=2024", year=[2024, 2024])
    assert read(training_data(job(same), [])) == {"x": [0, 10], "year": [2024, 2024]}
    other = write(tmp_path / "other", "year=2024", year=[2024, 2023])
    with pytest.raises(DataError, match=r"its column 'year' has other values than its folder, year=2024") as caught:
        read(training_data(job(other), []))
    assert "part-0.parquet" in caught.value.where
    assert read(training_data(job(other, columns=["x"]), [])) == {"x": [0, 10]}


def test_folders_with_other_keys_are_no_columns(tmp_path: Path) -> None:
    root = write(tmp_path / "data", "year=2024", "lang=de")
    pq.write_table(pa.table({"x": [1]}), write(tmp_path / "beside", "year=2024") / "0.parquet")
    for path in (root, tmp_path / "beside"):
        assert training_data(job(path), []).schema.names == ["x"]
    with pytest.raises(DataError, match="there is no column 'year'"):
        training_data(job(root, columns=["x", "year"]), [])


def test_columns_of_folders_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it names columns of folders alone") as caught:
        training_data(job(write(tmp_path / "data", "year=2024"), columns=["year"]), [])
    assert "some of x, too" in str(caught.value)


def test_values_that_cannot_be_compared_with_a_column_are_not(tmp_path: Path) -> None:
    root = write(tmp_path / "data", "split=train", split=[[1], [2]])
    assert read(training_data(job(root), [])) == {"x": [0, 10], "split": [[1], [2]]}
    dates = write(tmp_path / "dates", "day=2024-02-01", day=pa.array([19754, 19754], pa.date32()))
    assert training_data(job(dates), []).schema.names == ["x", "day"]
    read(training_data(job(dates), []))


def test_sources_of_a_mix_have_partitions_of_their_own(tmp_path: Path) -> None:
    roots = [write(tmp_path / name, f"year={year}") for name, year in (("a", 2023), ("b", 2024))]
    mix = [{"path": str(root), "weight": 1} for root in roots]
    found = training_data(job(mix=mix), [])
    assert [found.read_unit(unit).column("year").to_pylist() for unit in (0, 1)] == [[2023, 2023], [2024, 2024]]
    write(tmp_path / "c", "plain")
    with pytest.raises(DataError, match="column 'year' is missing"):
        mixed([found.parts[0], parquet_source(tmp_path / "c")])
