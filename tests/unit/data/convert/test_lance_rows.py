"""A Lance dataset becomes the rows of its newest version, and says what is wrong with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.convert import parts
from raytrain_plus.data.convert.conversion import converted
from raytrain_plus.data.convert.formats import lance_rows
from raytrain_plus.data.convert.formats.formats import format_of
from raytrain_plus.data.convert.formats.lance_rows import LanceRows, lance_files
from raytrain_plus.data.dataset import dataset
from raytrain_plus.errors import DataError
from tests.support.conversions import ROWS, TABLE, contents, quiet, write_stream

lance: Any = pytest.importorskip("lance")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches and parts, so that there are several."""
    monkeypatch.setattr(lance_rows, "BATCH_BYTES", 2000)
    monkeypatch.setattr(parts, "GROUP_BYTES", 2000)
    monkeypatch.setattr(parts, "GROUPS", 4)


def write(folder: Path, rows: pa.Table = TABLE, **settings: Any) -> Any:
    """Write a dataset of several files; return it."""
    return lance.write_dataset(rows, str(folder), max_rows_per_file=700, **settings)


def ids(path: Path, cache: Path) -> list[int]:
    return pq.read_table(dataset(path, cache=cache).describe()["path"]).column("id").to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["rows.lance", "rows"])
def test_its_rows_become_the_same_files_as_those_of_other_formats(tmp_path: Path, small: None, name: str) -> None:
    write(tmp_path / name)
    write_stream(tmp_path / "rows.arrow", ROWS)
    assert format_of(tmp_path / name) == "lance"
    seen, other = (dataset(tmp_path / one, cache=tmp_path / "cache") for one in (name, "rows.arrow"))
    assert contents(Path(seen.describe()["path"])) == contents(Path(other.describe()["path"]))
    assert seen.fingerprint == other.fingerprint
    assert (seen.named, seen.rows) == (str(tmp_path / name), len(ROWS))


def test_an_interrupted_conversion_continues_after_any_part(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.lance").delete("id % 3 = 1")
    whole = converted(tmp_path / "rows.lance", "lance", quiet, tmp_path / "whole")
    assert pq.read_table(whole).to_pylist() == [row for row in ROWS if row["id"] % 3 != 1]
    count = len([*whole.glob("part-*")])
    assert count > 5
    for number in range(1, count):
        cache = tmp_path / f"cache{number}"

        def cut(read: int, of: int, cache: Path = cache, number: int = number) -> None:
            if any((parts.load_progress(one) or parts.Progress("")).parts >= number for one in cache.glob(".*.part*")):
                raise InterruptedError

        with pytest.raises((InterruptedError, DataError)):
            converted(tmp_path / "rows.lance", "lance", cut, cache)
        assert contents(converted(tmp_path / "rows.lance", "lance", quiet, cache)) == contents(whole), number


@pytest.mark.parametrize("names_count_up", [False, True])
def test_the_newest_version_is_read(tmp_path: Path, names_count_up: bool) -> None:
    """Datasets of older versions of Lance have manifests whose names are the numbers of versions."""
    path, cache = tmp_path / "rows.lance", tmp_path / "cache"
    prints = set()
    for version in range(11):
        start = 100 * version
        mode = "append" if version else "create"
        write(path, TABLE.slice(start, 100), mode=mode, enable_v2_manifest_paths=not names_count_up)
        assert ids(path, cache) == list(range(start + 100))
        prints.add(dataset(path, cache=cache).fingerprint)
    assert len(prints) == 11
    lance.dataset(str(path)).delete("id >= 50")
    assert ids(path, cache) == list(range(50))
    prints.add(dataset(path, cache=cache).fingerprint)
    lance.dataset(str(path)).update({"x": "x + 1"}, where="id = 3")
    prints.add(dataset(path, cache=cache).fingerprint)
    assert len(prints) == 13
    lance.dataset(str(path), version=1).restore()
    assert ids(path, cache) == list(range(100))


def test_a_version_that_is_written_meanwhile_is_refused(tmp_path: Path, small: None) -> None:
    write(tmp_path / "rows.lance")
    done = [False]

    def append(read: int, of: int) -> None:
        if not done[0]:
            done[0] = True
            write(tmp_path / "rows.lance", TABLE.slice(0, 5), mode="append")

    with pytest.raises(DataError, match="changed while they were converted"):
        converted(tmp_path / "rows.lance", "lance", append, tmp_path / "cache")
    assert dataset(tmp_path / "rows.lance", cache=tmp_path / "cache").rows == len(ROWS) + 5


def test_the_version_of_the_manifest_is_read_whichever_is_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "rows.lance"
    write(folder, TABLE.slice(0, 20))
    files = [file for file in lance_files(folder) if isinstance(file, Path)]
    write(folder, TABLE.slice(20, 10), mode="append")
    reader = LanceRows(folder, files)
    schema = reader.schema(files, whole=False)
    assert sum(block.table.num_rows for file in files for block in reader.blocks(file, schema, 0)) == 20


def test_columns_keep_their_types_and_values(tmp_path: Path) -> None:
    blob = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    table = pa.table(
        {
            "blob": pa.array([b"one", None, b"three"], pa.large_binary()),
            "vector": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
            "name": pa.array(["a", "b", "a"]),
            "nested": pa.array([{"a": 1, "b": ["x"]}, None, {"a": 2, "b": []}]),
        }
    )
    write(tmp_path / "rows.lance", table.cast(table.schema.set(0, blob)))
    seen = dataset(tmp_path / "rows.lance", cache=tmp_path / "cache")
    assert pq.read_table(seen.describe()["path"]).to_pylist() == table.to_pylist()
    assert (seen.schema.types[0], seen.schema.field(0).metadata) == (pa.large_binary(), None)


def nothing(folder: Path) -> None:
    folder.mkdir()


def several(folder: Path) -> None:
    folder.mkdir()
    write(folder / "a.lance")
    write(folder / "b.lance")


def one_below(folder: Path) -> None:
    folder.mkdir()
    write(folder / "a.lance")


def no_rows(folder: Path) -> None:
    write(folder, TABLE.slice(0, 0))


def a_file(folder: Path) -> None:
    folder.touch()


def cut(folder: Path) -> None:
    write(folder)
    for file in (folder / "data").iterdir():
        os.truncate(file, 100)


def no_data(folder: Path) -> None:
    write(folder)
    next((folder / "data").iterdir()).unlink()


def cut_manifest(folder: Path) -> None:
    write(folder)
    os.truncate(next((folder / "_versions").glob("*.manifest")), 10)


BAD: list[tuple[Callable[[Path], None], str, str]] = [
    (nothing, "is not a Lance dataset: it has no manifest in _versions", ""),
    (several, "holds several Lance datasets: a.lance, b.lance", "name one of them, such as {}/a.lance"),
    (one_below, "is not itself a Lance dataset, but holds a.lance", "name {}/a.lance"),
    (no_rows, "there are no rows", ""),
    (a_file, "is not a Lance dataset: it is not a folder", ""),
    (cut, "is not a readable Lance dataset: ", ""),
    (no_data, "is not a readable Lance dataset: ", ""),
    (cut_manifest, "is not a readable Lance dataset: ", ""),
]


@pytest.mark.parametrize(("write_bad", "what", "remedy"), BAD, ids=[one[0].__name__ for one in BAD])
def test_what_is_wrong_is_said(tmp_path: Path, write_bad: Callable[[Path], None], what: str, remedy: str) -> None:
    path = tmp_path / "rows.lance"
    write_bad(path)
    with pytest.raises(DataError) as caught:
        dataset(path, cache=tmp_path / "cache")
    assert caught.value.what.startswith(what)
    assert "/home/" not in caught.value.what, "a place in Lance's source helps nobody"
    assert caught.value.where == str(path)
    assert caught.value.remedy.startswith(remedy.format(path))
    assert not list((tmp_path / "cache").glob("[!.]*")), "nothing half-made is left"


def test_a_pattern_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.lance")
    with pytest.raises(DataError, match="is not a folder") as caught:
        dataset(tmp_path / "*.lance", cache=tmp_path / "cache")
    assert caught.value.expected.endswith("and no pattern")


def test_without_pylance_the_remedy_is_said_unless_the_rows_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.lance")
    seen = dataset(tmp_path / "rows.lance", cache=tmp_path / "one")
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(DataError, match="need the Python package pylance, which is not installed") as caught:
        dataset(tmp_path / "rows.lance", cache=tmp_path / "other")
    assert caught.value.remedy == 'run `pip install "raytrain-plus[lance]"` on every machine'
    assert dataset(tmp_path / "rows.lance", cache=tmp_path / "one").fingerprint == seen.fingerprint


def test_only_files_that_can_hold_rows_count(tmp_path: Path) -> None:
    """An index over a column makes a new version of the same rows."""
    made = write(tmp_path / "rows.lance")
    before = dataset(tmp_path / "rows.lance", cache=tmp_path / "cache")
    made.create_scalar_index("id", "BTREE")
    assert lance.dataset(str(tmp_path / "rows.lance")).version == 2
    folders = {file.relative_to(tmp_path / "rows.lance").parts[0] for file in lance_files(tmp_path / "rows.lance")}  # type: ignore[arg-type]
    assert folders == {"_versions", "data"}
    assert dataset(tmp_path / "rows.lance", cache=tmp_path / "cache").fingerprint == before.fingerprint
