"""Class labels of Hugging Face's that number the classes otherwise are refused, in held-out data and in a mix."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.dataset import dataset, training_data
from raytrain_plus.data.sources.alike import alike
from raytrain_plus.data.sources.mixed_source import mixed
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.data.sources.source import Source
from raytrain_plus.errors import DataError
from tests.support.read_types import job


def features(names: list[str]) -> dict[str, object]:
    return {"label": {"names": names, "_type": "ClassLabel"}, "x": {"dtype": "int64", "_type": "Value"}}


def parquet(file: Path, *names: str, **others: list[str]) -> Source:
    """Write what `Dataset.to_parquet` does. `others`: classes of other columns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    labels = {name: {"names": found, "_type": "ClassLabel"} for name, found in others.items()}
    metadata = {b"huggingface": json.dumps({"info": {"features": features([*names]) | labels}}).encode()}
    pq.write_table(pa.table({"label": [0, 1], "x": [1, 2]}).replace_schema_metadata(metadata), file)
    return parquet_source(file.parent)


def saved(folder: Path, *names: str) -> Source:
    """Write what `save_to_disk` does."""
    folder.mkdir(parents=True)
    table = pa.table({"label": [0, 1], "x": [1, 2]})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    files = [{"filename": "data-00000-of-00001.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features([*names])}))
    return dataset(folder, cache=folder.parent / "cache")


@pytest.mark.parametrize("write", [parquet, saved])
def test_classes_in_another_order_are_refused(tmp_path: Path, write: object) -> None:
    at = "0.parquet" if write is parquet else ""
    train = write(tmp_path / "a" / at, "cat", "dog")  # type: ignore[operator]
    same, other = write(tmp_path / "b" / at, "cat", "dog"), write(tmp_path / "c" / at, "dog", "cat")  # type: ignore[operator]
    assert train.labels == {"label": ["cat", "dog"]}
    alike(train, same)
    mixed([train, same])
    with pytest.raises(DataError, match=r"classes of 'label' have other numbers .*: 0 is 'dog', not 'cat'") as caught:
        alike(train, other)
    assert "expected: the classes cat, dog" in str(caught.value)
    with pytest.raises(DataError, match="0 is 'dog', not 'cat'"):
        mixed([train, other])
    more = write(tmp_path / "d" / at, "cat", "dog", "hen")  # type: ignore[operator]
    with pytest.raises(DataError, match=r"have other numbers than in .*: 3, not 2"):
        alike(mixed([train, same]), more)


def test_files_of_one_path_must_have_the_same_classes(tmp_path: Path) -> None:
    parquet(tmp_path / "a" / "0.parquet", "cat", "dog")
    parquet(tmp_path / "a" / "1" / "1.parquet", "cat", "dog")
    training_data(job(tmp_path / "a"), [])
    parquet(tmp_path / "a" / "2" / "2.parquet", "dog", "cat")
    with pytest.raises(DataError, match=r"a/2/2\.parquet: the classes of 'label' have other numbers than"):
        training_data(job(tmp_path / "a"), [])
    # Another column may differ before that.
    parquet(tmp_path / "a" / "2" / "1.parquet", "cat", "dog", other=["one"])
    with pytest.raises(DataError, match=r"a/2/2\.parquet: the classes"):
        training_data(job(tmp_path / "a"), [])
    # Without the column, and in a run of an older version, they do not matter.
    training_data(job(tmp_path / "a", columns=["x"]), [])
    training_data(job(tmp_path / "a"), [], older=True)


def test_data_without_names_is_not_compared(tmp_path: Path) -> None:
    train = parquet(tmp_path / "a" / "0.parquet", "cat", "dog")
    (tmp_path / "b").mkdir()
    for metadata in ({}, {b"huggingface": b"{"}, {b"huggingface": b"[]"}):
        pq.write_table(
            pa.table({"label": [1], "x": [2]}).replace_schema_metadata(metadata), tmp_path / "b" / "0.parquet"
        )
        other = parquet_source(tmp_path / "b")
        assert other.labels == {}
        alike(train, other)
