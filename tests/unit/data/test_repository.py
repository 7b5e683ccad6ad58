"""The only split of a folder that is laid out like a dataset on Hugging Face's hub is found."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.dataset import dataset
from raytrain_plus.errors import DataError
from tests.support.datasets import seen_again


def write(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": [number] * 3}), folder / name)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"),
        ("data/train-00000-of-00001-1f2a3b.parquet",),
        ("plain/0000.parquet",),
    ],
)
def test_the_only_split_is_read(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = write(tmp_path / "repository", *names)
    (folder / "README.md").write_text("about")
    seen = dataset(folder, "huggingface")
    assert seen.rows == 3 * len(names)
    assert sorted(map(str, seen.places)) == [str(folder / one) for one in names]
    assert seen_again(seen) == seen


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        (
            ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
            "data/test-*.parquet, data/train-*.parquet",
        ),
        (("a/train-0000-of-0001.parquet", "b/train-0000-of-0001.parquet"), "a/train-*.parquet, b/train-*.parquet"),
    ],
)
def test_several_splits_are_named(tmp_path: Path, names: tuple[str, ...], listed: str) -> None:
    folder = write(tmp_path, *names)
    with pytest.raises(DataError) as raised:
        dataset(folder, "huggingface")
    assert raised.value.what == f"holds several splits: {listed}"
    assert raised.value.remedy == f"name one of them, such as {folder / listed.split(', ')[1]}"


def test_a_folder_without_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"contains no Parquet files; found 1 \.bin"):
        dataset(tmp_path, "huggingface")
