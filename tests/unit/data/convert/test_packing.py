"""Documents of any source become the rows that a plain loop makes of them, once, also if the packing is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer

from raytrain_plus import Data, Evaluate, Job
from raytrain_plus.checks.data_report import data_report
from raytrain_plus.data.convert import document_tokens, parts
from raytrain_plus.data.dataset import dataset, held_out_data, training_data
from raytrain_plus.data.of_job import held_out_rows_of, rows_of
from raytrain_plus.data.reading.first_rows import first_rows
from raytrain_plus.data.sources.alike import check_alike
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.data.sources.packing import packed
from raytrain_plus.data.sources.parquet_source import ParquetSource
from raytrain_plus.data.sources.source import Source
from raytrain_plus.data.sources.tokenized_source import TokenizedSource
from raytrain_plus.data.sources.user_dataset import open_dataset
from raytrain_plus.data.values.collate import ADDED
from raytrain_plus.data.values.tokens import POSITIONS
from raytrain_plus.errors import DataError
from raytrain_plus.task import Task
from tests.support.conversions import kill_after_a_part
from tests.support.datasets import seen_again
from tests.support.tokenizers import save, texts

TEXTS = ["the " * 600, *texts(400), ""]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tokenizer that truncates, adds [CLS] and [SEP], and says that [PAD] ends a document."""
    save(tmp_path / "saved")
    end_with(tmp_path / "saved", "[PAD]")
    return tmp_path / "saved"


def end_with(folder: Path, token: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small slices and parts, so that there are several."""
    monkeypatch.setattr(document_tokens, "SLICE_BYTES", 300)
    monkeypatch.setattr(parts, "GROUP_BYTES", 600)
    monkeypatch.setattr(parts, "GROUPS", 4)


def write_jsonl(file: Path, documents: list[Any], name: str = "text") -> Path:
    file.write_text("".join(json.dumps({name: one, "n": n}) + "\n" for n, one in enumerate(documents)))
    return file


def plain(file: Path, tokenizer: Path, length: int, end: int | None) -> tuple[list[list[int]], list[list[int]], int]:
    """Pack a file by a plain loop; return the rows, their positions, and the number of tokens that are left."""
    made = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    made.no_truncation()
    made.no_padding()
    tokens, positions = list[int](), list[int]()
    for line in file.read_text().splitlines():
        ids = made.encode(json.loads(line)["text"]).ids
        ids += [] if end is None else [end]
        tokens += ids
        positions += range(len(ids))
    starts = range(0, len(tokens) - length + 1, length)
    rows = ([values[start : start + length] for start in starts] for values in (tokens, positions))
    return next(rows), next(rows), len(tokens) % length


def rows(seen: Source, name: str = "input_ids") -> list[list[int]]:
    return [row for unit in range(len(seen.unit_rows)) for row in seen.read_unit(unit).column(name).to_pylist()]


@pytest.mark.parametrize(("length", "end"), [(2, 0), (37, 0), (37, None), (512, 3)])
def test_rows_are_those_of_a_plain_loop(tmp_path: Path, small: None, saved: Path, length: int, end: int | None) -> None:
    end_with(saved, None if end is None else {"content": ["[PAD]", "", "", "[SEP]"][end]})
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    seen = packed(dataset(file), length, saved)
    # [SEP] ends them already.
    expected, positions, left = plain(file, saved, length, None if end == 3 else end)
    assert rows(seen) == expected
    assert rows(seen, POSITIONS) == positions
    assert (seen.packing.dropped, seen.packing.end, seen.packing.documents) == (left, end, len(TEXTS))
    assert seen.schema == pa.schema([(name, pa.list_(pa.int64(), length)) for name in ("input_ids", ADDED[0])])
    assert any(max(row) >= 300 for row in positions), "a document is not truncated, and spans rows"


SOURCE = """
import torch
lists = [[n % 7] * (n % 5) for n in range(300)]
class Indexed(torch.utils.data.Dataset):
    def __len__(self): return len(lists)
    def __getitem__(self, index): return {"ids": lists[index]}
def indexed(): return Indexed()
def iterated(): return iter([{"ids": one} for one in lists])
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "lists_of.py").write_text(SOURCE)
    yield tmp_path
    sys.modules.pop("lists_of", None)
    open_dataset.cache_clear()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "indexed", "iterated"])
@pytest.mark.parametrize("ends", [True, False])
def test_lists_of_tokens_of_every_source_are_packed_in_order(
    root: Path, saved: Path, kind: str, ends: bool, small: None
) -> None:
    lists = [[n % 7] * (n % 5) for n in range(300)]
    source: dict[str, Any] = {"path": str(root / f"a.{kind}")}
    if kind == "jsonl":
        write_jsonl(root / "a.jsonl", lists)
    elif kind == "parquet":
        pq.write_table(pa.table({"ids": pa.array(lists, pa.list_(pa.uint16()))}), root / "a.parquet", row_group_size=40)
    else:
        source = {"dataset": f"lists_of:{kind}"}
    job = job_of(saved if ends else None, pack=16, **source)
    expected = [one for of in lists for one in ([*of, 0] if ends and of[-1:] != [0] else of)]
    made = rows(training_data(job, [root]))
    assert [token for row in made for token in row] == expected[: len(expected) // 16 * 16]


def job_of(tokenizer: Path | None, **settings: Any) -> Job:
    evaluate = settings.pop("evaluate", None)
    data = Data(batch_size=16, shards=2, tokenizer=None if tokenizer is None else str(tokenizer), **settings)
    return Job(name="x", task="t:T", data=data, steps=2, evaluate=evaluate)


def test_a_job_gets_packed_rows_and_the_held_out_ones(tmp_path: Path, saved: Path) -> None:
    trained, held = write_jsonl(tmp_path / "a.jsonl", TEXTS), write_jsonl(tmp_path / "b.jsonl", TEXTS[100:])
    job = job_of(saved, path=str(trained), pack=16, evaluate=Evaluate(path=str(held), every_steps=1))

    def shift(table: pa.Table, rng: np.random.Generator) -> pa.Table:
        assert table.column_names == ["input_ids", "position_ids"]
        return table

    seen, held_out = training_data(job, []), held_out_data(job, [])
    check_alike(seen, held_out)
    batch = Task.collate(None, first_rows(rows_of(job, seen, shift), 8))  # type: ignore[arg-type]
    assert (batch["input_ids"].shape, batch["input_ids"].dtype) == ((8, 16), torch.int64)
    assert batch["position_ids"].shape == (8, 16)
    first = first_rows(held_out_rows_of(job, held_out, None), 8)
    assert first.column("input_ids").to_pylist() == plain(held, saved, 16, 0)[0][:8]


def test_sources_of_a_mix_are_packed_each_by_itself(tmp_path: Path, saved: Path) -> None:
    files = [write_jsonl(tmp_path / f"{name}.jsonl", TEXTS[start:]) for name, start in (("a", 0), ("b", 250))]
    mix = [{"path": str(file), "weight": number + 1} for number, file in enumerate(files)]
    seen = training_data(job_of(saved, mix=mix, pack=16), [])
    assert [rows(source) for source in seen.parts] == [plain(file, saved, 16, 0)[0] for file in files]
    assert not isinstance(seen, TokenizedSource)
    said = seen.describe()
    assert [source["packed"]["documents"] for source in said["sources"]] == [len(TEXTS), len(TEXTS) - 250]
    end_with(saved, None)
    found = differences(training_data(job_of(saved, mix=mix, pack=16), []).describe(), said)
    assert found[:2] == [
        f"source {number}: data.tokenizer names another token that ends a document" for number in (0, 1)
    ]


def test_it_is_packed_once_until_something_changes(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = packed(dataset(file), 16, saved)
    left = plain(file, saved, 16, 0)[2]
    line = (
        f"402 documents, with the end token 0, packed in rows of 16 tokens; the last {left} tokens fill no row and are"
    )
    assert f"{file}: {line} dropped\n" == capsys.readouterr().err
    assert first.packing.line() == f"{line} dropped"
    again = seen_again(first)
    assert (again, again.describe()) == (first, first.describe())
    assert capsys.readouterr().err == ""
    assert packed(dataset(file), 17, saved).source.named != first.source.named
    capsys.readouterr()
    write_jsonl(file, TEXTS[1:])
    changed = packed(dataset(file), 16, saved)
    assert "a.jsonl has changed since it was packed: packing it again\n" in capsys.readouterr().err
    assert changed.source.named != first.source.named
    assert "the documents have changed" in differences(changed.describe(), first.describe())
    write_jsonl(file, TEXTS)
    assert packed(dataset(file), 16, saved).fingerprint == first.fingerprint
    end_with(saved, None)
    other = packed(dataset(file), 16, saved)
    assert other.fingerprint != first.fingerprint
    found = differences(other.describe(), first.describe())
    assert found[0] == "data.tokenizer names another token that ends a document"
    end_with(saved, "[PAD]")
    save(saved, change=1)
    # Its tokens are the same, because nothing is truncated.
    other = packed(dataset(file), 16, saved)
    assert other.fingerprint != first.fingerprint
    assert differences(other.describe(), first.describe())[0] == "data.tokenizer has another content"
    assert differences(dataset(file).describe(), first.describe())[1] == "only one of them is packed"


def test_what_is_dropped_is_reported(tmp_path: Path, saved: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    report = data_report(job_of(saved, path=str(file), pack=16), [])
    left = plain(file, saved, 16, 0)[2]
    assert report.dropped_tokens == left > 0
    assert any(f"the last {left} tokens fill no row and are dropped" in line for line in report.lines())
    assert data_report(job_of(None, path=str(file)), []).dropped_tokens is None


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_an_interrupted_packing_continues_after_its_last_part(
    tmp_path: Path, small: None, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"text": TEXTS})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=30)
    documents = dataset(tmp_path / "a.parquet")
    whole = contents(Path(packed(documents, 16, saved, cache=tmp_path / "other").source.named))
    assert len(whole) > 10
    real, calls = parts.ConvertedParts._write, [0]

    def cut(self: parts.ConvertedParts, count: int) -> None:
        calls[0] += 1
        if calls[0] % 4 == 0:
            raise KeyboardInterrupt
        real(self, count)

    monkeypatch.setattr(parts.ConvertedParts, "_write", cut)
    kept = dict[str, int]()
    for _ in range(100):
        try:
            made = packed(documents, 16, saved, cache=tmp_path / "cache")
            break
        except KeyboardInterrupt:
            [partial] = (tmp_path / "cache").glob(".*.partial")
            found = {file.name: file.stat().st_ino for file in partial.glob("part-*.parquet")}
            assert kept.items() <= found.items(), "its parts are kept"
            kept = found
    assert len(kept) >= 9
    assert contents(Path(made.source.named)) == whole


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_killed_packing_continues(tmp_path: Path, saved: Path) -> None:
    many = [f"{text} {n}" for n, text in enumerate(texts(2000) * 20)]
    pq.write_table(pa.table({"text": many}), tmp_path / "a.parquet", row_group_size=5000)
    code = (
        "import sys; from pathlib import Path\n"
        "from raytrain_plus.data.convert import parts; parts.GROUPS = 8\n"
        "from raytrain_plus.data.sources.packing import packed\n"
        "from raytrain_plus.data.dataset import dataset\n"
        "print(packed(dataset(sys.argv[1]), 64, sys.argv[2], cache=Path(sys.argv[3])).source.named)"
    )

    def words(cache: str) -> list[str]:
        return [sys.executable, "-c", code, str(tmp_path / "a.parquet"), str(saved), str(tmp_path / cache)]

    first = kill_after_a_part(words("cache"), tmp_path / "cache")
    made, whole = (
        Path(subprocess.run(words(cache), capture_output=True, text=True, check=True, timeout=60).stdout.strip())
        for cache in ("cache", "other")
    )
    assert (made / "part-00000.parquet").stat().st_ino == first
    assert contents(made) == contents(whole)
    assert len(contents(made)) > 3


def test_a_file_that_changes_meanwhile_is_not_packed(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=30)
    seen = dataset(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": TEXTS[::-1]}), tmp_path / "a.parquet", row_group_size=30)
    with pytest.raises(DataError, match="the file changed while its documents were packed\n"):
        packed(seen, 16, saved, cache=tmp_path / "cache")
    # Also after its last rows have been read.
    seen = dataset(tmp_path / "a.parquet")

    read_unit = ParquetSource.read_unit

    def read(documents: ParquetSource, unit: int, prefix: str = "") -> pa.Table:
        table = read_unit(documents, unit, prefix)
        if unit == len(documents.unit_rows) - 1:
            os.utime(tmp_path / "a.parquet", (1, 1))
        return table

    monkeypatch.setattr(ParquetSource, "read_unit", read)
    with pytest.raises(DataError, match="the file changed while its documents were packed\n"):
        packed(seen, 16, saved, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("[!.]*"))


def test_documents_that_differ_in_another_column_are_other_data(tmp_path: Path, saved: Path) -> None:
    made = []
    for number in (1, 2):
        pq.write_table(pa.table({"text": TEXTS, "n": [number] * len(TEXTS)}), tmp_path / "a.parquet")
        made.append(packed(dataset(tmp_path / "a.parquet"), 16, saved))
    assert rows(made[0]) == rows(made[1])
    assert made[0].fingerprint != made[1].fingerprint
    assert differences(made[1].describe(), made[0].describe()) == ["the documents have changed"]


def test_the_same_documents_packed_by_another_column_are_other_data(tmp_path: Path, saved: Path) -> None:
    more = [text[::-1] for text in TEXTS]
    pq.write_table(pa.table({"text": TEXTS, "more": more}), tmp_path / "a.parquet")
    made = {
        column: training_data(job_of(saved, path=str(tmp_path / "a.parquet"), pack=16, columns=[column]), [])
        for column in ("text", "more")
    }
    assert rows(made["text"]) != rows(made["more"])
    assert made["text"].fingerprint != made["more"].fingerprint
    again = seen_again(made["more"])
    assert again.fingerprint == made["more"].fingerprint


def test_types_that_are_read_otherwise_change_no_rows_that_are_packed(tmp_path: Path, saved: Path) -> None:
    """A run that is resumed finds the rows that it began with, whoever narrows a column beside the documents."""
    with (tmp_path / "a.jsonl").open("w") as out:
        out.writelines(json.dumps({"text": text, "score": 0.5}) + "\n" for text in TEXTS)
    wished = job_of(saved, path=str(tmp_path / "a.jsonl"), pack=16)
    assert training_data(wished, []).fingerprint == training_data(wished, [], older=True).fingerprint


REFUSED: list[tuple[dict[str, Any], bool, str]] = [
    ({"n": [1.5], "of": [b"x"]}, True, r"no column holds documents\n.* among n \(double\), of \(binary\)"),
    ({"text": ["a"], "more": ["b"], "n": [1]}, True, "2 columns could hold the documents: text, more"),
    ({"ids": [[1]], "labels": [[1]]}, False, "2 columns could hold the documents: ids, labels"),
    ({"text": ["a"]}, False, "column 'text' holds text, and data.pack needs tokens"),
    ({"text": ["a"], "n": [1]}, True, "documents have 4 tokens in all, too few for a row of 16"),
    ({"text": ["a", None]}, True, "row 1 of .*: column 'text' is null, so there is no document"),
    ({"ids": [[1, None]]}, False, "column 'ids' holds no token numbers: a number is null"),
    ({"ids": pa.array([[2**63]], pa.list_(pa.uint64()))}, False, "no token numbers: Integer value 92233"),
]


@pytest.mark.parametrize(("columns", "tokenized", "words"), REFUSED, ids=[words[:30] for _, _, words in REFUSED])
def test_what_cannot_be_packed_is_explained(
    tmp_path: Path, saved: Path, columns: dict[str, Any], tokenized: bool, words: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        packed(dataset(tmp_path / "a.parquet"), 16, saved if tokenized else None)
    assert re.search(words, str(caught.value))
    assert str(tmp_path / "a.parquet") in caught.value.where


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "tokenizer_config.json: is not a JSON object"),
        ("[]", "tokenizer_config.json: is not a JSON object"),
        ('{"eos_token": "</s>"}', "its eos_token '</s>' is not among the tokens of tokenizer.json"),
    ],
)
def test_an_end_that_is_no_token_is_explained(tmp_path: Path, saved: Path, content: str, words: str) -> None:
    (saved / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=re.escape(words)):
        packed(dataset(write_jsonl(tmp_path / "a.jsonl", TEXTS)), 16, saved)
