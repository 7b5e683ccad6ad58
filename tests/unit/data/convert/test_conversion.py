"""Data of any format becomes the same Parquet files, once, also if the conversion is killed."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.convert import parts
from raytrain_plus.data.convert.conversion import converted, earlier, source_files
from raytrain_plus.data.convert.formats import csv_rows, lines
from raytrain_plus.data.convert.formats.formats import format_of
from raytrain_plus.data.dataset import dataset
from raytrain_plus.data.sources.converted_source import ConvertedSource
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.errors import DataError
from tests.support.conversions import (
    NONE,
    ROWS,
    SOURCES,
    TABLE,
    contents,
    kill_after_a_part,
    quiet,
    write_csv,
    write_jsonl,
    write_stream,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and parts, so that there are several."""
    monkeypatch.setattr(lines, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(csv_rows, "_BLOCKS", (4000, 1 << 16, 1 << 20))
    monkeypatch.setattr(parts, "GROUP_BYTES", 2000)
    monkeypatch.setattr(parts, "GROUPS", 4)


def convert(tmp_path: Path, name: str, told: Callable[[int, int], None] = quiet) -> Path:
    return converted(tmp_path / name, format_of(tmp_path / name), told, tmp_path / "cache")


@pytest.mark.parametrize("name", SOURCES)
def test_the_same_rows_become_the_same_files(tmp_path: Path, small: None, name: str) -> None:
    write_stream(tmp_path / "reference.arrow", ROWS)
    SOURCES[name](tmp_path / name, ROWS)
    made = convert(tmp_path, name)
    assert contents(made) == contents(convert(tmp_path, "reference.arrow"))
    assert pq.read_table(made).equals(TABLE)
    seen = dataset(tmp_path / name, cache=tmp_path / "cache")
    assert (seen.rows, len(set(seen.unit_rows[:-1]))) == (len(ROWS), 1)
    assert isinstance(seen, ConvertedSource)
    assert (seen.named, len(seen.places) > 5) == (str(tmp_path / name), True)


@pytest.mark.parametrize("name", SOURCES)
def test_an_interrupted_conversion_continues_after_its_last_part(tmp_path: Path, small: None, name: str) -> None:
    SOURCES[name](tmp_path / name, ROWS)
    whole = contents(converted(tmp_path / name, format_of(tmp_path / name), quiet, tmp_path / "other"))

    class Cut(Exception):
        pass

    def cut(read: int, of: int) -> None:
        if len(list((tmp_path / "cache").glob(".*.partial/part-*.parquet"))) >= 3:
            raise Cut

    with pytest.raises(Cut):
        convert(tmp_path, name, cut)
    [partial] = (tmp_path / "cache").glob(".*.partial")
    before = {file.name: file.stat().st_ino for file in partial.glob("part-*.parquet")}
    made = convert(tmp_path, name)
    assert contents(made) == whole
    assert {name: (made / name).stat().st_ino for name in before} == before, "its parts are kept"


@pytest.mark.timeout(60)
def test_a_killed_conversion_continues(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"id": n, "t": "x" * 500} for n in range(80_000)])
    code = (
        "import sys; from pathlib import Path\n"
        "from raytrain_plus.data.convert import parts; parts.GROUPS = 8\n"
        "from raytrain_plus.data.convert.conversion import converted\n"
        "print(converted(Path(sys.argv[1]), 'jsonl', lambda read, of: None, Path(sys.argv[2])))"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "rows.jsonl"), str(tmp_path / "cache")]
    first = kill_after_a_part(words, tmp_path / "cache")
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=50)
    made = Path(done.stdout.strip())
    assert (made / "part-00000.parquet").stat().st_ino == first
    assert pq.read_table(made, columns=["id"]).column("id").to_pylist() == list(range(80_000))
    assert len(list(made.glob("part-*"))) > 3


def test_data_is_converted_once_until_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    write_jsonl(file, ROWS)
    made = [0]

    def count(read: int, of: int) -> None:
        made[0] += 1

    both = [threading.Thread(target=converted, args=(file, "jsonl", count, cache)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(20)
    assert made == [1]
    first = dataset(file, cache=cache)
    assert capsys.readouterr().err == ""
    write_jsonl(file, ROWS[1:])
    second = dataset(file, cache=cache)
    assert capsys.readouterr().err == "rows.jsonl has changed since it was converted: converting it again\n"
    assert (first.rows, second.rows) == (3000, 2999)
    assert [str(folder) for folder in earlier(Path(second.describe()["path"]))] == [first.describe()["path"]]


def with_two_labels_exchanged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    other = next(number for number, row in enumerate(rows) if row["label"] != rows[0]["label"])
    labels = {0: rows[other]["label"], other: rows[0]["label"]}
    return [{**row, "label": labels.get(number, row["label"])} for number, row in enumerate(rows)]


def with_another_label(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*rows[:10], {**rows[10], "label": (rows[10]["label"] + 1) % 10}, *rows[11:]]


@pytest.mark.parametrize("change", [with_two_labels_exchanged, with_another_label])
def test_rows_of_the_same_size_and_range_are_other_data(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    """The footers of Parquet files know sizes and extremes; they often miss one value, or the order."""
    draw = random.Random(0)
    rows = [{"x": draw.random(), "label": draw.randrange(10)} for _ in range(5000)]
    made = []
    for name, written in (("here", rows), ("there", change(rows))):
        write_csv(tmp_path / "a.csv", written)
        made.append(dataset(tmp_path / "a.csv", cache=tmp_path / name))
    here, there = made
    assert here.describe()["files"] == there.describe()["files"], "what this test is about"
    assert here.fingerprint != there.fingerprint
    assert differences(there.describe(), here.describe()) == ["some rows have other values, or another order"]
    write_csv(tmp_path / "a.csv", rows[1:])
    fewer = dataset(tmp_path / "a.csv", cache=tmp_path / "fewer")
    assert differences(fewer.describe(), here.describe()) == ["it has 4,999 rows, not 5,000"]


def test_values_beyond_the_sample_widen_a_column(tmp_path: Path, small: None) -> None:
    rows = [{"a": n} for n in range(2000)] + [{"a": 0.5, "b": "late"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    table = pq.read_table(convert(tmp_path, "rows.jsonl"))
    assert table.schema == pa.schema([("a", pa.float64()), ("b", pa.string())])
    assert table.to_pylist() == [{"b": None, **row} for row in rows]
    (tmp_path / "rows.csv").write_text("a\n" + "".join(f"{n}\n" for n in range(2000)) + "0.5\n")
    assert pq.read_table(convert(tmp_path, "rows.csv")).column("a").to_pylist() == [*range(2000), 0.5]
    for late, first in (([{"a": "x"}], None), ([{"a": [1]}], [])):
        write_jsonl(tmp_path / "late.jsonl", [{"a": first}] * 2000 + late)
        assert pq.read_table(convert(tmp_path, "late.jsonl")).to_pylist() == [{"a": first}] * 2000 + late


def test_numbers_of_a_csv_are_numbers_only_if_all_are_written_so(tmp_path: Path, small: None) -> None:
    columns = {
        "whole": (["1", "-20", ""], pa.int64(), [1, -20, None]),
        "zip": (["02134", "7", "8"], pa.string(), ["02134", "7", "8"]),
        "hex": (["0x1F", "1", "2"], pa.string(), ["0x1F", "1", "2"]),
        "na": (["NA", "1", "2"], pa.string(), ["NA", "1", "2"]),
        "mixed": (["true", "0", "1"], pa.string(), ["true", "0", "1"]),
        "flag": (["true", "False", ""], pa.bool_(), [True, False, None]),
        "x": (["1e3", "-.5", "inf"], pa.float64(), [1000.0, -0.5, float("inf")]),
        "id": (["9007199254740993", "0.5", "1"], pa.string(), ["9007199254740993", "0.5", "1"]),
        "long": (["18446744073709551615", "1", "2"], pa.string(), ["18446744073709551615", "1", "2"]),
        "day": (["2026-01-02", "", "x"], pa.string(), ["2026-01-02", "", "x"]),
    }
    lines_ = [",".join(columns), *(",".join(of[0][row] for of in columns.values()) for row in range(3))]
    (tmp_path / "a.csv").write_text("\n".join(lines_))
    table = pq.read_table(convert(tmp_path, "a.csv"))
    assert table.schema == pa.schema([(name, kind) for name, (_, kind, _) in columns.items()])
    assert table.to_pydict() == {name: values for name, (_, _, values) in columns.items()}
    # Beyond the sample.
    (tmp_path / "b.csv").write_text("a\n" + "1\n" * 3000 + "007\n")
    assert pq.read_table(convert(tmp_path, "b.csv")).column("a")[-1].as_py() == "007"


def test_whole_numbers_are_never_rounded(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 9007199254740993}\n{"a": 0.5}\n')
    with pytest.raises(DataError, match="holds 9007199254740993") as caught:
        convert(tmp_path, "a.jsonl")
    assert caught.value.where.endswith("a.jsonl, line 2")
    (tmp_path / "b.jsonl").write_text('{"a": 9007199254740993}\n')
    assert pq.read_table(convert(tmp_path, "b.jsonl")).to_pylist() == [{"a": 9007199254740993}]


@pytest.mark.parametrize("format_", ["jsonl", "text"])
def test_it_continues_after_any_part_with_lines_of_any_length(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, format_: Any
) -> None:
    """A block that is read again from its begin can be shorter than it was."""
    monkeypatch.setattr(parts, "GROUPS", 1)
    draw = random.Random(0)
    write_jsonl(tmp_path / "a.jsonl", [{"id": n, "t": "x" * draw.randrange(3000)} for n in range(200)])
    whole = contents(converted(tmp_path / "a.jsonl", format_, quiet, tmp_path / "whole"))
    for number in range(1, sum(name.startswith("part-") for name in whole)):
        cache = tmp_path / f"cache{number}"

        def cut(read: int, of: int, cache: Path = cache, number: int = number) -> None:
            if any((parts.load_progress(one) or NONE).parts >= number for one in cache.glob(".*.partial")):
                raise InterruptedError

        with pytest.raises((InterruptedError, DataError)):
            converted(tmp_path / "a.jsonl", format_, cut, cache)
        assert contents(converted(tmp_path / "a.jsonl", format_, quiet, cache)) == whole, number


def test_files_that_change_meanwhile_are_refused(tmp_path: Path, small: None) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    done = [False]

    def change(read: int, of: int) -> None:
        if not done[0]:
            done[0] = True
            write_jsonl(tmp_path / "a.jsonl", [{**row, "id": -1} for row in ROWS])

    with pytest.raises(DataError, match="changed while they were converted"):
        convert(tmp_path, "a.jsonl", change)
    assert set(pq.read_table(convert(tmp_path, "a.jsonl")).column("id").to_pylist()) == {-1}


def test_a_part_that_is_missing_is_made_again(tmp_path: Path, small: None) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    made = convert(tmp_path, "a.jsonl")
    whole = contents(made)
    (made / "part-00002.parquet").unlink()
    assert dataset(tmp_path / "a.jsonl", cache=tmp_path / "cache").rows == len(ROWS)
    assert contents(made) == whole


def test_names_in_capitals_count_too(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    write_csv(tmp_path / "one" / "a.TSV", ROWS[:5], tab=True)
    write_csv(tmp_path / "one" / "b.csv", ROWS[5:9])
    assert pq.read_table(convert(tmp_path, "one")).to_pylist() == ROWS[:9]


def test_text_keeps_every_line(tmp_path: Path, small: None) -> None:
    said = ["", "one", "", "zwei ü", "x" * 20_000, "last"]
    (tmp_path / "a.txt").write_text("\r\n".join(said), encoding="utf-8", newline="")
    assert pq.read_table(convert(tmp_path, "a.txt")).column("text").to_pylist() == said


def test_dates_stay_text_and_nested_values_stay_nested(tmp_path: Path) -> None:
    rows = [{"day": "2026-01-02", "at": {"when": "2026-01-02T03:04:05Z", "n": [1, 2]}}, {"day": "no day", "at": None}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    assert pq.read_table(convert(tmp_path, "a.jsonl")).to_pylist() == rows


def split_folder(folder: Path) -> None:
    folder.mkdir()
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def no_state(folder: Path) -> None:
    folder.mkdir()
    (folder / "x.arrow").write_bytes(b"")


def cut_stream(file: Path) -> None:
    write_stream(file, ROWS)
    os.truncate(file, file.stat().st_size - 8)


BAD: list[tuple[str, Any, str, str]] = [
    ("a.jsonl", b'{"a": 1}\n{"a": \n{"a": 3}\n', "a.jsonl, line 2", "is not JSON: "),
    ("a.jsonl", b'{"a": 1}\n[1]\n', "a.jsonl, line 2", "is a JSON list, not an object"),
    ("a.jsonl", b"", "a.jsonl", "there are no rows"),
    ("a.csv", b"a,b\n1,2\n3\n", "a.csv, line 3", "Expected 2 columns, got 1: 3"),
    ("a.csv", b"a,a\n1,2\n", "a.csv", "column 'a' is there twice"),
    ("a.csv", b"a,b\n", "a.csv", "there are no rows"),
    ("a.csv", b"a;b\n1;2\n", "a.csv, line 1", "its only column is 'a;b': the names are separated by semicolons"),
    ("a.csv", b"a\tb\n1\t2\n", "a.csv, line 1", "the names are separated by tabs"),
    ("a.tsv", b"a,b\n1,2\n", "a.tsv, line 1", "the names are separated by commas"),
    ("a.csv", b"0.5,-1,3\n1,2,3\n", "a.csv, line 1", "holds numbers, not the names of columns: 0.5, -1, 3"),
    ("a.csv", b"", "a.csv", "is empty"),
    ("a.jsonl", b'{"a": {}}\n{"a": null}\n', "a.jsonl", "column 'a' is struct<>, which Parquet cannot hold"),
    ("a.jsonl", b'{"a": 1}\n\n{"a": 1e999}\n', "a.jsonl, line 3", "Number too big to be stored in double."),
    ("a.jsonl", b'{"a": 1}\n{"b": 1, "b": 2}\n', "a.jsonl, line 2", "Column(/b) was specified twice"),
    ("a.json", b"[1]", "a.json", "is not a Parquet file, and its name tells no other format"),
    ("a.txt", b"fine\n\xff\xfe\n", "a.txt, line 2", "is not UTF-8 text"),
    ("a.arrow", cut_stream, "a.arrow", "it has no end"),
    ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "a.jsonl, line 2", "is not UTF-8 text"),
    ("a.csv", b"a\n\xff\n", "a.csv, line 2", "is not UTF-8 text"),
    ("a.arrow", b"nothing", "a.arrow", "is not a readable Arrow file"),
    ("saved", split_folder, "saved", "holds several splits: train, test"),
    ("saved", no_state, "saved", "contains no Parquet files"),
]


@pytest.mark.parametrize(("name", "content", "where", "what"), BAD, ids=[f"{one[0]} {one[3][:20]}" for one in BAD])
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, name: str, content: Any, where: str, what: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        content(tmp_path / name)
    kind = "huggingface" if name == "saved" else None
    with pytest.raises(DataError) as caught:
        dataset(tmp_path / name, kind, cache=tmp_path / "cache")
    assert what in caught.value.what
    assert caught.value.where.endswith(where), caught.value
    assert not list((tmp_path / "cache").glob("[!.]*")), "nothing half-made is left"


@pytest.mark.parametrize("bad", ["", "{", '{"n": "\\ud800"}', '{"n": 1, "n": 2}', '{"n": "x"}', '{"n": {"m": 1}}'])
def test_a_broken_line_has_its_own_number_in_every_block(tmp_path: Path, small: None, bad: str) -> None:
    for at in (3, 700, 2500):
        text = [json.dumps({"n": n, "t": "x" * 40}) for n in range(3000)]
        text[at - 1] = bad
        text.insert(at // 2, "")
        (tmp_path / "a.jsonl").write_text("\n".join(text) + "\n")
        if not bad:
            assert dataset(tmp_path / "a.jsonl", cache=tmp_path / "cache").rows == 2999
            continue
        with pytest.raises(DataError) as caught:
            dataset(tmp_path / "a.jsonl", cache=tmp_path / "cache")
        assert caught.value.where == f"{tmp_path}/a.jsonl, line {at + 1}"
        assert " in row " not in caught.value.what


def test_a_key_without_values_in_the_first_rows_may_have_them_later(tmp_path: Path, small: None) -> None:
    rows: list[dict[str, Any]] = [{"n": n, "a": {}} for n in range(2000)] + [{"n": 2000, "a": {"b": 1}}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    assert pq.read_table(convert(tmp_path, "a.jsonl")).column("a").to_pylist()[-2:] == [{"b": None}, {"b": 1}]


def test_a_long_value_of_a_csv_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_rows, "_BLOCKS", (1000, 1 << 16, 1 << 20))
    rows = [{"n": n, "t": "x\n" * (20_000 if n == 1500 else 5)} for n in range(3000)]
    write_csv(tmp_path / "a.csv", rows)
    assert pq.read_table(convert(tmp_path, "a.csv")).to_pylist() == rows
    write_csv(tmp_path / "b.csv", [{"n": n, "t": "x" * (1 << 21 if n == 1500 else 5)} for n in range(3000)])
    with pytest.raises(DataError, match="a row is longer than") as caught:
        convert(tmp_path, "b.csv")
    assert caught.value.where == f"{tmp_path / 'b.csv'}, row 1501"


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("at", [2, 2990])
def test_a_quote_that_is_not_closed_takes_no_rows_with_it(tmp_path: Path, small: None, name: str, at: int) -> None:
    text = ["n,t", *(f"{n},{'x' * 20}" for n in range(3000))]
    text[at] = f'{at - 1},"xx'
    rows = ("\n".join(text) + "\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith(".gz") else rows)
    with pytest.raises(DataError, match="a quote is not closed") as caught:
        dataset(tmp_path / name, cache=tmp_path / "cache")
    assert caught.value.where == f"{tmp_path / name}, row {at}"
    # The remedy.
    text[at] += '"'
    rows = ("\n".join(text) + "\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith(".gz") else rows)
    assert dataset(tmp_path / name, cache=tmp_path / "cache").rows == 3000


def test_larger_blocks_are_not_read_far_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_rows, "_AHEAD_BYTES", 0)
    write_csv(tmp_path / "a.csv", [{"n": n, "t": "x" * 100} for n in range(40_000)])
    taken = 0
    with csv_rows._opened(tmp_path / "a.csv", 100_000) as (raw, _, batches):
        for batch in batches:
            time.sleep(0.01)
            assert raw.tell() <= taken + 4 * 100_000
            taken += batch.nbytes
    assert taken > 40_000 * 100


def test_a_value_may_end_in_an_end_of_line(tmp_path: Path) -> None:
    for end in ("", "\n", " \r\n"):
        (tmp_path / "a.csv").write_bytes(b'n,t\n1,x\n2,"y\n"' + end.encode())
        assert pq.read_table(convert(tmp_path, "a.csv")).num_rows == 2


def test_a_value_of_nine_mebibytes_is_read(tmp_path: Path) -> None:
    rows = [{"n": 1, "t": "x" * (9 << 20)}, {"n": 2, "t": "y"}]
    write_csv(tmp_path / "a.csv", rows)
    assert pq.read_table(convert(tmp_path, "a.csv")).to_pylist() == rows


@pytest.mark.parametrize("header", ["2019,2020", '"a, b",c', '"a, b"', "0,1", "x;y,z", "a"])
def test_these_names_of_columns_are_taken(tmp_path: Path, header: str) -> None:
    names = next(csv.reader([header]))
    (tmp_path / "a.csv").write_text(header + "\n" + ",".join("1" for _ in names) + "\n")
    assert pq.read_table(convert(tmp_path, "a.csv")).to_pydict() == {name: [1] for name in names}


def test_a_format_that_no_name_tells_is_asked_for(tmp_path: Path) -> None:
    for folder, files in (("two", ["a.csv", "b.jsonl"]), ("none", []), ("other", ["a.rst"]), ("cut", ["a.parquet"])):
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / name).write_text('{"a": 1}\n')
    said = {}
    for folder in ("two", "none", "other", "cut"):
        with pytest.raises(DataError) as caught:
            dataset(tmp_path / folder, cache=tmp_path / "cache")
        said[folder] = caught.value
    assert said["two"].what in (f"holds files of several formats: 1 {one}" for one in ("csv, 1 jsonl", "jsonl, 1 csv"))
    assert said["two"].remedy.startswith("set data.format to one of them, or name the files of one")
    assert said["none"].what == "contains no Parquet files; found nothing"
    assert said["other"].expected.startswith("files named as *.parquet, *.jsonl, *.csv, ")
    assert said["other"].remedy == "put the data there; or set data.format"
    assert "is not a readable Parquet file" in said["cut"].what
    assert dataset(tmp_path / "two", "jsonl", cache=tmp_path / "cache").rows == 1
    pq.write_table(TABLE, tmp_path / "rows")
    assert dataset(tmp_path / "rows", cache=tmp_path / "cache").rows == len(ROWS)


def test_types_that_have_nothing_in_common_are_named(tmp_path: Path, small: None) -> None:
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "a.jsonl", [{"a": 1}])
    write_jsonl(tmp_path / "folder" / "b.jsonl", [{"a": "one"}])
    with pytest.raises(DataError) as caught:
        convert(tmp_path, "folder")
    assert str(caught.value).splitlines()[0].endswith("folder/b.jsonl: column 'a' is string")
    assert caught.value.expected == f"int64, as in {tmp_path / 'folder' / 'a.jsonl'}"
    write_jsonl(tmp_path / "c.jsonl", [{"a": n} for n in range(2000)] + [{"a": "one"}])
    with pytest.raises(DataError, match="column 'a' changed from number to string") as caught:
        convert(tmp_path, "c.jsonl")
    assert caught.value.where == f"{tmp_path / 'c.jsonl'}, line 2001"


def test_the_format_is_recognised_by_the_names_of_files(tmp_path: Path) -> None:
    formats = {"a.parquet": "parquet", "b.csv": "csv", "c.JSONL": "jsonl", "d.txt.zst": "text", "e.unknown": "parquet"}
    for name in formats:
        (tmp_path / name).touch()
    assert {name: format_of(tmp_path / name) for name in formats} == formats
    assert format_of(tmp_path) == "parquet", "several formats"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "x.csv.gz").touch()
    (tmp_path / "one" / ".hidden.jsonl").touch()
    assert format_of(tmp_path / "one") == "csv"
    assert format_of(tmp_path / "*.ndjson") == "jsonl"
    assert [file.name for file in source_files(tmp_path / "one", "csv")] == ["x.csv.gz"]
