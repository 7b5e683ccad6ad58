"""Samples of tar files become rows as WebDataset groups them; a broken file is an error that names the member."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.convert import parts
from raytrain_plus.data.convert.conversion import converted
from raytrain_plus.data.convert.formats import tar_samples
from raytrain_plus.data.dataset import dataset
from raytrain_plus.errors import DataError
from tests.support.conversions import write


def samples(count: int, begin: int = 0) -> list[tuple[str, bytes]]:
    return [
        member
        for n in range(begin, begin + count)
        for member in (
            (f"{n:05}.jpg", b"image" * (n % 50)),
            (f"{n:05}.cls", f"{n}\n".encode()),
            (f"{n:05}.txt", f"an é {n}".encode()),
            (f"{n:05}.json", json.dumps({"n": n, "tags": ["a"] * (n % 3)}).encode()),
        )
    ]


def rows(count: int, begin: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "image": b"image" * (n % 50),
            "cls": n,
            "txt": f"an é {n}",
            "json": {"n": n, "tags": ["a"] * (n % 3)},
        }
        for n in range(begin, begin + count)
    ]


def read(path: Path, tmp_path: Path) -> pa.Table:
    return pq.read_table(dataset(path, cache=tmp_path / "cache").describe()["path"])


def quiet(read: int, of: int) -> None:
    assert 0 <= read <= of


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and parts, so that there are several."""
    monkeypatch.setattr(tar_samples, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(parts, "GROUP_BYTES", 3000)
    monkeypatch.setattr(parts, "SAMPLE_ROWS", 20)
    monkeypatch.setattr(parts, "GROUPS", 1)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.TGZ"])
def test_rows_and_columns(tmp_path: Path, small: None, name: str) -> None:
    write(tmp_path / name.lower(), samples(150))
    (tmp_path / name.lower()).rename(tmp_path / name)
    table = read(tmp_path / name, tmp_path)
    assert table.to_pylist() == rows(150)
    kinds = {field.name: field.type for field in table.schema}
    assert kinds == {
        "image": pa.binary(),
        "cls": pa.int64(),
        "txt": pa.string(),
        "json": pa.struct([("n", pa.int64()), ("tags", pa.list_(pa.string()))]),
    }


def test_several_files_are_one_dataset_and_a_sample_may_lack_columns(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards" / "0.tar", samples(2))
    write(tmp_path / "shards" / "1.tar.gz", [("x.png", b"p"), ("y.index", b"-3"), ("y.npy", b"\x93")])
    table = read(tmp_path / "shards", tmp_path)
    nothing = dict.fromkeys(("image", "cls", "txt", "json", "index", "npy"))
    assert table.to_pylist() == [
        *[{**nothing, **row} for row in rows(2)],
        {**nothing, "image": b"p"},
        {**nothing, "index": -3, "npy": b"\x93"},
    ]


def test_samples_are_grouped_as_webdataset_does(tmp_path: Path) -> None:
    members = [
        ("./v1.0/a.jpg", b"1"),
        ("./v1.0/a.SEG.png", b"2"),
        ("./v1.0/b.jpg", b"3"),
        ("./v2.0/b.jpg", b"4"),
        ("./.hidden/c.jpg", b"-"),
        ("./._d.jpg", b"-"),
        ("./__meta__/e.jpg", b"-"),
        ("./README", b"-"),
        ("./v1.0/a.jpg", b"5"),
    ]
    write(tmp_path / "a.tar", members)
    assert read(tmp_path / "a.tar", tmp_path).to_pylist() == [
        {"image": b"1", "seg.png": b"2"},
        {"image": b"3", "seg.png": None},
        {"image": b"4", "seg.png": None},
        {"image": b"5", "seg.png": None},
    ]


def test_two_images_of_a_sample_keep_their_names(tmp_path: Path, small: None) -> None:
    first = [(f"{n}.jpg", b"j") for n in range(200)]
    write(tmp_path / "a.tar", [*first, ("x.png", b"p")])
    assert read(tmp_path / "a.tar", tmp_path).to_pylist() == [{"image": b"j"}] * 200 + [{"image": b"p"}]
    # Only the whole file says so.
    write(tmp_path / "b.tar", [*first, ("x.png", b"p"), ("x.jpg", b"q")])
    both = [{"jpg": b"j", "png": None}] * 200 + [{"jpg": b"q", "png": b"p"}]
    assert read(tmp_path / "b.tar", tmp_path).to_pylist() == both


def test_values_beyond_the_first_samples_widen_a_column(tmp_path: Path, small: None) -> None:
    values = [*({"a": n, "b": []} for n in range(200)), {"a": 0.5, "b": ["late"]}]
    write(tmp_path / "a.tar", [(f"{n}.json", json.dumps(value).encode()) for n, value in enumerate(values)])
    table = read(tmp_path / "a.tar", tmp_path)
    assert table.schema.field("json").type == pa.struct([("a", pa.float64()), ("b", pa.list_(pa.string()))])
    assert table.column("json").to_pylist() == values
    # Parquet cannot hold a struct without fields.
    values = [*({"a": {}} for _ in range(200)), {"a": {"b": 1}}]
    write(tmp_path / "c.tar", [(f"{n}.json", json.dumps(value).encode()) for n, value in enumerate(values)])
    assert read(tmp_path / "c.tar", tmp_path).column("json").to_pylist()[-2:] == [{"a": {"b": None}}, {"a": {"b": 1}}]
    write(tmp_path / "b.tar", [*((f"{n}.jpg", b"") for n in range(200)), ("x.txt", b"late")])
    assert read(tmp_path / "b.tar", tmp_path).column("txt").to_pylist() == [None] * 200 + ["late"]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_it_continues_after_any_part(tmp_path: Path, small: None, name: str) -> None:
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards" / name, samples(90))
    write(tmp_path / "shards" / "b.tar", samples(60, 90))

    def made(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}

    whole = converted(tmp_path / "shards", "webdataset", quiet, tmp_path / "whole")
    assert pq.read_table(whole).to_pylist() == rows(150)
    for number in range(1, len([*whole.glob("part-*")])):
        cache = tmp_path / f"cache{number}"

        def cut(read: int, of: int, cache: Path = cache, number: int = number) -> None:
            if any(
                (parts.load_progress(one) or parts.Progress("")).parts >= number for one in cache.glob(".*.partial")
            ):
                raise InterruptedError

        with pytest.raises((InterruptedError, DataError)):
            converted(tmp_path / "shards", "webdataset", cut, cache)
        assert made(converted(tmp_path / "shards", "webdataset", quiet, cache)) == made(whole), number


def test_a_changed_tar_is_converted_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for count in (3, 4):
        write(tmp_path / "a.tar", samples(count))
        assert read(tmp_path / "a.tar", tmp_path).to_pylist() == rows(count)
    assert "a.tar has changed since it was converted" in capsys.readouterr().err


def damaged_header(file: Path) -> None:
    write(file, samples(3))
    content = bytearray(file.read_bytes())
    at = content.index(b"00001.cls")
    content[at : at + 5] = b"XXXXX"
    file.write_bytes(content)


def cut_at(position: int) -> Any:
    def made(file: Path) -> None:
        write(file, samples(3))
        content = file.read_bytes()
        file.write_bytes(content[: content.index(b"00001.cls") + position])

    return made


def joined(file: Path) -> None:
    write(file, samples(3))
    file.write_bytes(file.read_bytes() * 2)


def linked(file: Path) -> None:
    with tarfile.open(file, "w") as tar:
        entry = tarfile.TarInfo("a.jpg")
        entry.type, entry.linkname = tarfile.SYMTYPE, "b.jpg"
        tar.addfile(entry)


def cut_gzip(file: Path) -> None:
    write(file, samples(300))
    file.write_bytes(file.read_bytes()[:-50])


def wrong_checksum(file: Path) -> None:
    write(file, samples(3))
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)


BAD: list[tuple[str, Any, str, str]] = [
    ("a.tar", damaged_header, "a.tar, member 00001.jpg", "the header of the next member is damaged"),
    ("a.tar", cut_at(0), "a.tar, member 00001.jpg", "it has no end"),
    ("a.tar", cut_at(100), "a.tar, member 00001.jpg", "it has no end"),
    ("a.tar", cut_at(513), "a.tar, member 00001.cls", "unexpected end of data"),
    ("a.tar", joined, "a.tar, member 00002.json", "other data follows its end"),
    ("a.tar", linked, "a.tar, member a.jpg", "is a link"),
    ("a.tar", lambda file: file.write_bytes(b""), "a.tar", "is not a readable tar file"),
    ("a.tar", lambda file: file.write_bytes(b"<html>" * 500), "a.tar", "is not a readable tar file"),
    ("a.tar", lambda file: write(file, []), "a.tar", "there are no rows"),
    ("a.tar.gz", lambda file: write(file.with_name("x.tar"), []) or file.write_bytes(b"no"), "a.tar.gz", "not a gzip"),
    ("a.tar.gz", cut_gzip, "", "is not a readable tar file"),
    ("a.tar.gz", wrong_checksum, "a.tar.gz, member 00002.json", "CRC check failed"),
    ("a.tar", [("a.jpg", b"1"), ("a.JPG", b"2")], "member a.JPG", "the sample has two members 'jpg'"),
    ("a.tar", [("a.cls", b"cat")], "member a.cls", "is not a whole number of 64 bits"),
    ("a.tar", [("a.cls", b"9223372036854775808")], "member a.cls", "is not a whole number of 64 bits"),
    ("a.tar", [("a.txt", b"\xff")], "member a.txt", "is not UTF-8 text"),
    ("a.tar", [("a.json", b"{")], "member a.json", "is not JSON"),
    ("a.tar", [("a.json", b"\xff")], "member a.json", "is not JSON"),
    ("a.tar", [("a.json", b'{"n": 1}'), ("b.json", b'{"n": "x"}')], "member b.json", "column 'json' has no type"),
    ("a.tar", [("a.json", b"{}")], "a.tar", "holds an object that has no fields in any sample"),
    ("a.tar", [("a.json", b'{"n": 9007199254740993}'), ("b.json", b'{"n": 0.5}')], "member b.json", "column 'json'"),
]


@pytest.mark.parametrize(("name", "content", "where", "what"), BAD, ids=[f"{one[0]} {one[3][:30]}" for one in BAD])
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, name: str, content: Any, where: str, what: str) -> None:
    write(tmp_path / name, content) if isinstance(content, list) else content(tmp_path / name)
    with pytest.raises(DataError) as caught:
        dataset(tmp_path / name, cache=tmp_path / "cache")
    assert what in caught.value.what, caught.value
    assert caught.value.where.endswith(where), caught.value
    assert not list((tmp_path / "cache").glob("[!.]*")), "nothing half-made is left"


def test_types_that_have_nothing_in_common_are_named(tmp_path: Path, small: None) -> None:
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards" / "0.tar", [("a.json", b'{"n": 1}')])
    write(tmp_path / "shards" / "1.tar", [("a.json", b'"text"')])
    with pytest.raises(DataError, match="column 'json' is string") as caught:
        dataset(tmp_path / "shards", cache=tmp_path / "cache")
    assert caught.value.where.endswith("1.tar")
    late = [*((f"{n}.json", b'{"n": 1}') for n in range(200)), ("x.json", b"[1]")]
    write(tmp_path / "late.tar", late)
    with pytest.raises(DataError, match="column 'json'"):
        dataset(tmp_path / "late.tar", cache=tmp_path / "cache")


def test_compressed_and_plain_are_the_same(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", samples(20))
    (tmp_path / "b.tgz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    assert read(tmp_path / "a.tar", tmp_path).equals(read(tmp_path / "b.tgz", tmp_path))
