"""Rows are read with the columns and types that a job says, that a model takes, and that other data has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raytrain_plus import Task
from raytrain_plus.data.dataset import held_out_data, training_data
from raytrain_plus.data.reading.transform_block import without_ids
from raytrain_plus.data.sources.alike import alike
from raytrain_plus.errors import DataError
from tests.support.read_types import job, read


def lines(file: Path, *rows: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def parquet(file: Path, **columns: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)
    return file


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


ROWS = {"id": [1, 2], "x": [0.5, 1.5], "label": ["7", "8"]}


def test_a_job_reads_the_columns_that_it_names_in_that_order(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", **ROWS)
    assert read(training_data(job(file, columns=["label", "x"]), [])) == {"label": ["7", "8"], "x": [0.5, 1.5]}
    found = training_data(job(file, columns={"label": "int64", "id": "float32"}), [])
    assert read(found) == {"label": [7, 8], "id": [1.0, 2.0]}
    assert found.schema == pa.schema({"label": pa.int64(), "id": pa.float32()})
    # Nothing else is read, so nothing else has to be readable.
    assert training_data(job(file), []).fingerprint == found.fingerprint


def test_the_size_of_rows_is_that_of_the_columns_that_are_read(tmp_path: Path) -> None:
    pictures = [bytes(range(256)) * 40 + bytes([row]) for row in range(64)]
    file = parquet(
        tmp_path / "a.parquet", **{"a.b": pictures, "x": [0.5] * 64, "list": [[row, row] for row in range(64)]}
    )
    [whole] = training_data(job(file), []).unit_bytes
    assert whole > 64 * 10_000
    assert training_data(job(file, columns=["a.b"]), []).unit_bytes[0] == pytest.approx(whole, rel=0.01)
    [numbers] = training_data(job(file, columns=["x"]), []).unit_bytes
    assert numbers == pytest.approx(64 * 8, rel=0.3)
    [halves] = training_data(job(file, columns={"x": "float32"}), []).unit_bytes
    assert halves == pytest.approx(numbers / 2, rel=0.01)
    # Of text formats fractions are read in half the bytes, beside a choice of columns.
    with (tmp_path / "a.jsonl").open("w") as out:
        out.writelines(json.dumps({"x": 0.1 + row, "t": "x" * 20 + str(row)}) + "\n" for row in range(2000))
    [halves] = training_data(job(tmp_path / "a.jsonl", columns=["x"]), []).unit_bytes
    assert halves == pytest.approx(2000 * 4, rel=0.3)


def test_a_column_that_is_not_there_or_does_not_fit_is_named(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", x=["a", "1"])
    with pytest.raises(DataError, match=r"there is no column 'xs' at .*a\.parquet") as caught:
        training_data(job(file, columns=["xs"]), [])
    assert "did you mean 'x'?" in str(caught.value)
    with pytest.raises(DataError, match=r"its rows cannot be read as x: int64: Failed to parse string: 'a'"):
        read(training_data(job(file, columns={"x": "int64"}), []))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_fractions_of_text_become_float32_unless_the_job_says_float64(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name == "a.csv":
        file.write_text("id,x\n1,0.1\n2,1.5\n")
    else:
        lines(file, {"id": 1, "x": 0.1}, {"id": 2, "x": 1.5})
    found = training_data(job(file), [])
    assert found.schema == pa.schema({"id": pa.int64(), "x": pa.float32()})
    batch = Task().collate(without_ids(found.read_unit(0)))
    assert torch.nn.Linear(1, 1)(batch["x"][:, None]).shape == (2, 1)
    assert batch["id"].dtype == torch.int64
    wide = training_data(job(file, columns={"id": "int64", "x": "float64"}), [])
    assert wide.schema.field("x").type == pa.float64()
    assert read(wide)["x"][0] == 0.1
    # A run of an older version goes on as it began.
    older = training_data(job(file), [], older=True)
    assert older.schema.field("x").type == pa.float64()
    assert older.fingerprint == found.fingerprint


def test_lists_of_fractions_do_so_too_and_parquet_does_not(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"x": [0.5, 1.5]}, {"x": [2.5]})
    assert training_data(job(file), []).schema.field("x").type == pa.list_(pa.float32())
    assert training_data(job(parquet(tmp_path / "a.parquet", **ROWS)), []).schema.field("x").type == pa.float64()


def test_types_that_were_guessed_apart_are_united(tmp_path: Path) -> None:
    train = lines(tmp_path / "train.jsonl", {"x": 1, "note": None}, {"x": 2, "note": None})
    held_out = lines(tmp_path / "held_out.jsonl", {"note": "a", "x": 0.5}, {"note": "b", "x": 1})
    wanted = job(train, held_out=held_out)
    seen, tested = alike(training_data(wanted, []), held_out_data(wanted, []))
    assert seen.schema == tested.schema == pa.schema({"x": pa.float32(), "note": pa.string()})
    assert read(seen) == {"x": [1.0, 2.0], "note": [None, None]}
    assert read(tested) == {"x": [0.5, 1.0], "note": ["a", "b"]}
    mix = [{"path": str(train), "weight": 1}, {"path": str(held_out), "weight": 1}]
    mixed = training_data(job(mix=mix), [])
    assert mixed.schema == seen.schema
    assert [mixed.read_unit(unit).column("x").to_pylist() for unit in (0, 1)] == [[1.0, 2.0], [0.5, 1.0]]


def test_types_with_nothing_in_common_are_refused_with_the_way_out(tmp_path: Path) -> None:
    train = lines(tmp_path / "train.jsonl", {"x": 7})
    held_out = lines(tmp_path / "held_out.jsonl", {"x": "007"})
    wanted = job(train, held_out=held_out)
    with pytest.raises(DataError, match=r"other columns than the training data: 'x' is string, not int64") as caught:
        alike(training_data(wanted, []), held_out_data(wanted, []))
    assert "data.columns" in str(caught.value)
    said = job(train, held_out=held_out, columns={"x": "string"})
    seen, tested = alike(training_data(said, []), held_out_data(said, []))
    assert (read(seen), read(tested)) == ({"x": ["7"]}, {"x": ["007"]})
    mix = [{"path": str(train), "weight": 1}, {"path": str(held_out), "weight": 1}]
    assert training_data(job(mix=mix, columns={"x": "string"}), []).schema == seen.schema


def test_doubles_of_parquet_stay_so_beside_whole_numbers(tmp_path: Path) -> None:
    mix = [
        {"path": str(parquet(tmp_path / "a" / "0.parquet", x=[1, 2])), "weight": 1},
        {"path": str(parquet(tmp_path / "b" / "0.parquet", x=[0.5])), "weight": 1},
    ]
    assert training_data(job(mix=mix), []).schema.field("x").type == pa.float64()
