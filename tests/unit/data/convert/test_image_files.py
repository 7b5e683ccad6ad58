"""Image files become rows of encoded bytes and labels, in the order of their names."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raytrain_plus.data.convert import parts
from raytrain_plus.data.convert.conversion import converted
from raytrain_plus.data.convert.formats.formats import format_of
from raytrain_plus.data.dataset import dataset
from raytrain_plus.data.reading.transform_block import without_ids
from raytrain_plus.data.reading.unusable import judge
from raytrain_plus.data.sources.alike import check_alike
from raytrain_plus.data.sources.converted_source import class_names
from raytrain_plus.data.values.images import DecodeImages
from raytrain_plus.errors import DataError


def encoded(number: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (5 + number % 3, 4), (number % 256, number // 256, 9)).save(out, kind)
    return out.getvalue()


def write(root: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(number))


def quiet(read: int, of: int) -> None:
    assert 0 <= read <= of


def read(path: Path, cache: Path) -> pa.Table:
    seen = dataset(path, cache=cache)
    return pq.read_table(seen.describe()["path"])


def test_rows_are_the_files_in_order_and_labels_number_the_class_folders(tmp_path: Path) -> None:
    names = ["zebra/b/2.png", "ant/10.png", "zebra/1.PNG", "ant/9.png", "bee/.hidden.png", "cat/x.png"]
    write(tmp_path / "tree", names)
    table = read(tmp_path / "tree", tmp_path / "cache")
    ordered = ["ant/10.png", "ant/9.png", "cat/x.png", "zebra/1.PNG", "zebra/b/2.png"]
    assert table.column("image").to_pylist() == [(tmp_path / "tree" / name).read_bytes() for name in ordered]
    assert table.column("label").to_pylist() == [0, 0, 1, 2, 2]
    assert table.schema.remove_metadata() == pa.schema([("image", pa.binary()), ("label", pa.int64())])
    assert json.loads(table.schema.metadata[b"classes"]) == ["ant", "cat", "zebra"]
    seen = dataset(tmp_path / "tree", cache=tmp_path / "cache")
    assert class_names(seen) == ["ant", "cat", "zebra"]
    assert seen.schema.metadata is None


def test_every_kind_of_image_is_kept_as_it_is(tmp_path: Path) -> None:
    kinds = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP", "gif": "GIF", "tif": "TIFF"}
    kinds["tiff"] = "TIFF"
    (tmp_path / "flat").mkdir()
    for suffix, kind in kinds.items():
        (tmp_path / "flat" / f"a.{suffix}").write_bytes(encoded(7, kind))
    table = read(tmp_path / "flat", tmp_path / "cache")
    assert table.column_names == ["image"], "without folders there are no labels"
    assert table.column("image").to_pylist() == [encoded(7, kinds[suffix]) for suffix in sorted(kinds)]


def test_a_pattern_and_a_file_name_images_too(tmp_path: Path) -> None:
    write(tmp_path / "tree", ["b/1.png", "a/1.png", "a/2.png"])
    table = read(tmp_path / "tree" / "*" / "1.png", tmp_path / "cache")
    assert table.column("label").to_pylist() == [0, 1]
    assert read(tmp_path / "tree" / "b" / "*.png", tmp_path / "cache").column_names == ["image"]
    assert read(tmp_path / "tree" / "b" / "1.png", tmp_path / "cache").to_pylist() == [{"image": encoded(0)}]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_conversion_continues_after_any_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(parts, "GROUPS", 1)
    monkeypatch.setattr(parts, "SAMPLE_ROWS", 10)
    monkeypatch.setattr(parts, "GROUP_BYTES", 2000)
    write(tmp_path / "tree", [f"{number % 3}/{number:03}.png" for number in range(70)])
    whole = converted(tmp_path / "tree", "images", quiet, tmp_path / "whole")
    assert len(list(whole.glob("part-*"))) > 4

    def cut(read: int, of: int) -> None:
        if any(
            (parts.load_progress(one) or parts.Progress("")).parts >= at
            for one in (tmp_path / "cache").glob(".*.partial")
        ):
            raise InterruptedError

    with pytest.raises((InterruptedError, DataError)):
        converted(tmp_path / "tree", "images", cut, tmp_path / "cache")
    [partial] = (tmp_path / "cache").glob(".*.partial")
    before = {file.name: file.stat().st_ino for file in partial.glob("part-*.parquet")}
    assert len(before) == at
    made = converted(tmp_path / "tree", "images", quiet, tmp_path / "cache")
    assert {name: (made / name).stat().st_ino for name in before} == before, "its parts are kept"
    assert [file.read_bytes() for file in sorted(made.iterdir())] == [
        file.read_bytes() for file in sorted(whole.iterdir())
    ]


def test_progress_counts_the_bytes_of_all_files(tmp_path: Path) -> None:
    write(tmp_path / "tree", ["a/1.png", "a/2.png", "b/3.png"])
    sizes = [file.stat().st_size for file in sorted((tmp_path / "tree").glob("*/*"))]
    told: list[tuple[int, int]] = []
    converted(tmp_path / "tree", "images", lambda read, of: told.append((read, of)), tmp_path / "cache")
    assert told == [(sum(sizes[: number + 1]), sum(sizes)) for number in range(3)]


def test_a_changed_image_is_converted_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "tree", ["a/1.png", "b/2.png"])
    read(tmp_path / "tree", tmp_path / "cache")
    (tmp_path / "tree" / "b" / "2.png").write_bytes(encoded(5))
    assert read(tmp_path / "tree", tmp_path / "cache").column("image")[1].as_py() == encoded(5)
    assert "has changed since it was converted" in capsys.readouterr().err


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    for content, what in (
        (b"", "it is empty"),
        (b"<html>", "it has no header that Pillow knows"),
        (encoded(1)[:20], "Truncated File Read"),
    ):
        write(tmp_path / "tree", ["a/1.png", "b/2.png"])
        (tmp_path / "tree" / "b" / "2.png").write_bytes(content)
        with pytest.raises(DataError) as caught:
            dataset(tmp_path / "tree", cache=tmp_path / "cache")
        assert caught.value.what == f"is not a readable image: {what}"
        assert caught.value.where == str(tmp_path / "tree" / "b" / "2.png")


def test_an_image_beside_class_folders_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "tree", ["a/1.png", "b/2.png", "stray.png"])
    with pytest.raises(DataError, match="lies beside folders of images: a, b") as caught:
        dataset(tmp_path / "tree", cache=tmp_path / "cache")
    assert caught.value.where == str(tmp_path / "tree" / "stray.png")


def test_held_out_images_must_have_the_same_classes(tmp_path: Path) -> None:
    write(tmp_path / "train", ["a/1.png", "b/2.png", "c/3.png"])
    write(tmp_path / "good", ["a/9.png", "b/8.png", "c/7.png"])
    write(tmp_path / "bad", ["a/9.png", "c/7.png"])
    train, good, bad = (dataset(tmp_path / name, cache=tmp_path / "cache") for name in ("train", "good", "bad"))
    check_alike(train, good)
    with pytest.raises(DataError, match="only one of the training data and the held-out data has images of b"):
        check_alike(train, bad)


def test_a_missing_pillow_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "tree", ["a/1.png"])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError) as caught:
        dataset(tmp_path / "tree", cache=tmp_path / "cache")
    assert "raytrain-plus[images]" in caught.value.remedy


def test_a_folder_of_images_alone_is_recognised(tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "only": (["a/1.JPG", "b/2.webp"], "images"),
        "lines": (["rows.jsonl", "picture.png"], "jsonl"),
        "tars": (["0.tar", "1.tgz"], "webdataset"),
        "mixed": (["0.tar", "rows.csv"], "parquet"),
        "parquet": (["a.parquet", "b.png", "c.png"], "parquet"),
        "described": (["a/1.png", "b/2.png", "labels.txt"], "images"),
    }
    for folder, (files, _) in names.items():
        for file in files:
            (tmp_path / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / file).touch()
    assert {folder: format_of(tmp_path / folder) for folder in names} == {
        folder: kind for folder, (_, kind) in names.items()
    }


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>"])
def test_a_file_that_is_no_image_is_a_row_where_rows_may_be_skipped(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (4, 4), (60 * number, 0, 0)).save(folder / f"{number}.png")
    (folder / "2.png").write_bytes(content)
    with pytest.raises(DataError, match="is not a readable image"):
        dataset(folder, cache=tmp_path / "cache")
    found = dataset(folder, cache=tmp_path / "cache", skip=True)
    assert found.rows == 4
    rows = without_ids(found.read_unit(0))
    judged = judge((DecodeImages(4, 4),), rows, lambda place: rows.slice(place, 1))
    assert [*judged.faults] == [2]
    assert found.name_rows(0, [2]) == str(folder / "2.png")
