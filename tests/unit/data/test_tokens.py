"""Text becomes the tokens that tokenizers makes of it, the same ones however the rows are divided."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer

from raytrain_plus.data.dataset import held_out_data, training_data
from raytrain_plus.data.of_job import held_out_rows_of, rows_of
from raytrain_plus.data.reading.first_rows import first_rows
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.data.values.collate import pad
from raytrain_plus.data.values.row_fault import RowFault
from raytrain_plus.data.values.tokens import Tokenized, _loaded, tokenizer_file
from raytrain_plus.errors import DataChanged, DataError, InputError
from tests.support.tokenizers import job, save, texts


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "saved")
    return tmp_path / "saved"


def ids(folder: Path, given: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return [tokenizer.encode(text).ids for text in given]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_text_becomes_the_tokens_that_tokenizers_makes(saved: Path, kind: pa.DataType) -> None:
    given = [*texts(20), "", "unknown ☃", "the " * 40]
    rows = pa.table({"label": range(23), "text": pa.array(given).cast(kind), "more": [[1]] * 23})
    made = Tokenized(tokenizer_file(saved))(rows)
    assert made.column_names == ["label", "input_ids", "more"]
    assert made.column("input_ids").type == pa.list_(pa.int64())
    expected = ids(saved, given)
    assert made.column("input_ids").to_pylist() == expected
    assert expected[20] == [2, 3]
    assert len(expected[22]) == 10
    assert made.column("label").to_pylist() == list(range(23))
    batch = pad(made)
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].shape == (23, 10)


def test_several_columns_of_text_keep_their_names(saved: Path) -> None:
    made = Tokenized(tokenizer_file(saved / "tokenizer.json"))(pa.table({"a": ["the"], "n": [1], "b": ["film plot"]}))
    assert made.column_names == ["a_input_ids", "n", "b_input_ids"]
    assert made.column("b_input_ids").to_pylist() == ids(saved, ["film plot"])


def test_tokens_do_not_depend_on_blocks_or_threads(saved: Path) -> None:
    table = pa.table({"text": texts(300)})
    made = Tokenized(tokenizer_file(saved))
    whole = made(table).column("input_ids").to_pylist()
    rng = random.Random(3)
    cuts = [(start, rng.randrange(1, 300 - start)) for start in (rng.randrange(299) for _ in range(40))]
    with ThreadPoolExecutor(4) as threads:
        for (start, size), part in zip(cuts, threads.map(lambda cut: made(table.slice(*cut)), cuts), strict=True):
            assert part.column("input_ids").to_pylist() == whole[start : start + size]


def test_it_travels_to_other_processes_and_forks_without_a_word(saved: Path) -> None:
    made = Tokenized(tokenizer_file(saved))
    assert pickle.loads(pickle.dumps(made)) == made
    code = (
        "import os, pickle, sys, pyarrow as pa\n"
        "made = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "rows = pa.table({'text': ['the plot'] * 2000})\n"
        "from raytrain_plus.data.values.tokens import _loaded\n"
        "_loaded(made.file)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "made(rows)\n"
        "assert len(os.listdir('/proc/self/task')) == before, 'it has started threads'\n"
        "child = os.fork()\n"
        "made(rows)\n"
        "child or os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", code, pickle.dumps(made).hex()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def shouts(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    return table.set_column(0, "text", pa.array([f"{text} film" for text in table.column("text").to_pylist()]))


def test_a_job_tokenizes_what_its_transform_returns(tmp_path: Path, saved: Path) -> None:
    every = texts(40)
    for granule in (3, 1024):
        wanted = job(tmp_path, saved, granule=granule)
        rows = first_rows(rows_of(wanted, training_data(wanted, []), shouts), 8)
        expected = ids(saved, [f"{every[number]} film" for number in rows.column("number").to_pylist()])
        assert rows.column("input_ids").to_pylist() == expected
    held_out = held_out_rows_of(wanted, held_out_data(wanted, []), None)
    assert first_rows(held_out, 8).column("input_ids").to_pylist() == ids(saved, every[:8])
    plain = job(tmp_path, None)
    assert "text" in first_rows(rows_of(plain, training_data(plain, []), None), 8).column_names


def test_another_content_is_other_data(tmp_path: Path, saved: Path) -> None:
    before, without = training_data(job(tmp_path, saved), []), training_data(job(tmp_path, None), [])
    copied = shutil.copytree(saved, tmp_path / "copied")
    assert training_data(job(tmp_path, copied), []).fingerprint == before.fingerprint != without.fingerprint
    save(saved, change=1)
    after = training_data(job(tmp_path, saved), [])
    assert after.fingerprint != before.fingerprint
    for one, other in ((after, before), (without, before), (before, without)):
        assert differences(one.describe(), other.describe()) == ["data.tokenizer has another content"]


def test_a_tokenizer_that_changes_during_a_run_is_not_used(saved: Path) -> None:
    file = tokenizer_file(saved)
    rows, made = pa.table({"text": ["the plot"]}), Tokenized(file)
    before = made(rows)
    save(saved, change=1)
    # This process has loaded it.
    assert made(rows).equals(before)
    _loaded.cache_clear()
    with pytest.raises(DataChanged, match="the tokenizer changed while the run used it"):
        made(rows)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"a": [1], "b": [[1]]}, r"no column holds text\n.*a column of text among a \(int64\), b \(list"),
        ({"text": ["a"], "input_ids": [[1]]}, "column 'text' would become the column 'input_ids', which exists"),
    ],
)
def test_rows_that_cannot_be_tokenized_are_explained(saved: Path, columns: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=rf"data.tokenizer: {saved}.*{words}"):
        Tokenized(tokenizer_file(saved))(pa.table(columns))


def test_a_row_without_tokens_is_named(saved: Path) -> None:
    with pytest.raises(RowFault, match="column 'text' holds a null, which has no tokens") as caught:
        Tokenized(tokenizer_file(saved))(pa.table({"text": ["a", None]}))
    assert caught.value.row == 1


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "there is no such file or folder"),
        ({}, r"has no tokenizer.json and no other file(.|\n)*fix: .*save_pretrained"),
        ({"config.json": "{}"}, r"has no tokenizer.json, only config.json(.|\n)*save_pretrained"),
        (
            {"tokenizer.model": "x", "config.json": "{}"},
            r"has no tokenizer.json, only tokenizer.model, the files of a slow(.|\n)*use_fast=True",
        ),
        (
            {"vocab.json": "{}", "merges.txt": ""},
            r"has no tokenizer.json, only merges.txt, vocab.json, the files of a slow",
        ),
        ({"tokenizer.json": "{"}, r"is not a readable tokenizer \(1 bytes\): EOF while parsing(.|\n)*save_pretrained"),
        ({"tokenizer.json": "[]"}, "is not a readable tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_explained(tmp_path: Path, files: dict[str, str] | None, words: str) -> None:
    folder = tmp_path / "folder"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(DataError, match=rf"data.tokenizer: {folder}\S*: {words}"):
        tokenizer_file(folder)


def test_a_tokenizer_that_draws_random_numbers_is_refused(saved: Path) -> None:
    content = json.loads((saved / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.1
    (saved / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"drops merges at random \(dropout 0.1\)"):
        tokenizer_file(saved)


def test_a_missing_package_says_how_to_install_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(saved, change=2)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r'not installed\n  fix: pip install "raytrain-plus\[transformers\]"'):
        tokenizer_file(saved)


def test_relative_paths_start_at_the_working_directory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    assert tokenizer_file("saved") == tokenizer_file(saved)
