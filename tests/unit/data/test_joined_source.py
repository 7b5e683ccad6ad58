"""Documents of any format are one stream, which is that of a plain loop, made once, and cut into windows."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from raytrain_plus import Data, Evaluate, Job
from raytrain_plus.audit.audit import audit
from raytrain_plus.data.dataset import both_data, training_data
from raytrain_plus.data.sources import joined_source
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.data.sources.joined_source import JoinedSource
from raytrain_plus.errors import DataError
from tests.support.datasets import seen_again, to_rows
from tests.support.ledgers import notes_of, run_of
from tests.support.tokenizers import save, texts

LENGTH = 8
DOCUMENTS = [np.random.default_rng(n).integers(0, 100, n % 7).tolist() for n in range(120)]
STREAM = [token for document in DOCUMENTS for token in document]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    table = pa.table({"tokens": pa.array(DOCUMENTS, pa.list_(pa.int32())), "number": range(len(DOCUMENTS))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=25)
    return tmp_path / "a.parquet"


def job_of(path: Path, *, evaluate: Evaluate | None = None, **data: Any) -> Job:
    given: dict[str, Any] = {"windows": LENGTH, "batch_size": 16, "shards": 4, **data}
    return Job(name="run", task="t:T", data=Data(path=str(path), **given), epochs=1, seed=3, evaluate=evaluate)


def used(job: Job) -> list[tuple[list[int], list[int]]]:
    """Return the rows of all units, sorted."""
    seen = training_data(job, [])
    return sorted((x, y) for unit in range(len(seen.unit_rows)) for x, y, _ in to_rows(seen.read_unit(unit)))


def windows_in(stream: list[int], stride: int = 1) -> list[tuple[list[int], list[int]]]:
    begins = range(0, len(stream) - LENGTH, stride)
    return sorted((stream[i : i + LENGTH], stream[i + 1 : i + 1 + LENGTH]) for i in begins)


@pytest.mark.parametrize("stride", [1, LENGTH])
def test_lists_of_tokens_in_parquet_and_in_json_lines_are_one_stream(file: Path, tmp_path: Path, stride: int) -> None:
    lines = (json.dumps({"tokens": document}) for document in DOCUMENTS)
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    assert used(job_of(file, stride=stride)) == windows_in(STREAM, stride)
    assert used(job_of(tmp_path / "a.jsonl", stride=stride)) == windows_in(STREAM, stride)


def test_text_with_a_tokenizer_that_ends_documents(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[PAD]"}))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(30)))
    tokenizer = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = tokenizer.token_to_id("[PAD]")
    stream = [token for text in texts(30) for token in [*tokenizer.encode(text).ids, end]]
    assert used(job_of(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "saved"))) == windows_in(stream)


def test_the_stream_is_joined_once_for_windows_of_any_length(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = training_data(job_of(file), [])
    monkeypatch.setattr(joined_source, "_write", lambda *_: pytest.fail("joined again"))
    assert training_data(job_of(file), []).fingerprint == first.fingerprint
    assert training_data(job_of(file, windows=5, stride=5), []).rows == (len(STREAM) - 6) // 5 + 1
    again = seen_again(pickle.loads(pickle.dumps(first)))
    assert again.read_unit(1).equals(first.read_unit(1))


def test_a_killed_joining_begins_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = joined_source._numbers

    def killed(documents: Any, tokens: Any, unit: int) -> Any:
        if unit == 2:
            raise KeyboardInterrupt
        return real(documents, tokens, unit)

    monkeypatch.setattr(joined_source, "_numbers", killed)
    with pytest.raises(KeyboardInterrupt):
        training_data(job_of(file), [])
    monkeypatch.setattr(joined_source, "_numbers", real)
    assert used(job_of(file)) == windows_in(STREAM)


def test_changed_documents_are_joined_again_and_are_other_data(file: Path) -> None:
    first = training_data(job_of(file), [])
    changed = [*DOCUMENTS[:-1], [7, 7]]
    pq.write_table(pa.table({"tokens": changed, "number": range(len(changed))}), file, row_group_size=25)
    second = training_data(job_of(file), [])
    assert second.fingerprint != first.fingerprint
    assert differences(second.describe(), first.describe())
    with pytest.raises(DataError, match="sees different data than the driver"):
        seen_again(first)


def test_held_out_documents_and_the_audit(file: Path, tmp_path: Path) -> None:
    job = replace(job_of(file, evaluate=Evaluate(path=str(file), every_steps=5)), storage=str(tmp_path))
    seen, tested = both_data(job, [])
    assert isinstance(seen, JoinedSource)
    assert tested is not None
    assert tested.rows == seen.rows == len(STREAM) - LENGTH
    assert seen.user_files == {str(file): file.stat().st_size}
    assert audit(run_of(job, notes_of(job))).clean


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"text": ["a"]}, "column 'text' holds text, and data.windows needs tokens"),
        ({"x": [1]}, "no column holds documents"),
        ({"x": [[1]], "y": [[2]]}, "2 columns could hold the documents: x, y"),
        ({"x": [[1, 2, 3]]}, "its documents have 3 tokens in all, too few for a window of 8"),
        ({"x": [[1] * 20, [-1]]}, "column 'x' holds numbers that no token has"),
        ({"x": [[1.5] * 20]}, "no column holds documents"),
    ],
)
def test_what_cannot_be_joined(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=said):
        training_data(job_of(tmp_path / "a.parquet"), [])


def test_the_column_of_the_documents_can_be_chosen(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[1] * 20], "y": [list(range(20))]}), tmp_path / "a.parquet")
    assert used(job_of(tmp_path / "a.parquet", columns=["y"])) == windows_in(list(range(20)))
