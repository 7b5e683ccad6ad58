"""Replace the text of rows by the numbers of its tokens: the setting `data.tokenizer`."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from raytrain_plus.errors import DataChanged, DataError, InputError, first_line

FILE = "tokenizer.json"
IDS = "input_ids"
_SAVED = "write it with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), and name FOLDER"
_LOADED = 4
"""The most tokenizers that a process keeps."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer.json: where it is, and what it holds."""

    path: str
    """Absolute."""
    sha256: str
    """Of the file."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Replaces each column of text by the numbers of its tokens; a `RowByRow` function.

    The only column of text becomes `input_ids`, lists of int64; of several, each becomes `<column>_input_ids`. Special
    tokens and truncation are as the file says; nothing is padded.
    """

    file: TokenizerFile

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Return the rows with tokens in place of text, other columns as they are.

        Raises `DataError` if no column holds text, a text is null, or a new column has the name of another one, and
        `DataChanged` if the file has changed.
        """
        texts = [name for name in rows.column_names if _is_text(rows.column(name).type)]
        where = f"data.tokenizer: {self.file.path}"
        if not texts:
            found = ", ".join(f"{name} ({rows.column(name).type})" for name in rows.column_names)
            raise DataError(
                "no column holds text",
                where=where,
                expected=f"a column of text among {found}",
                remedy="keep the text in data.transform, or leave out data.tokenizer if the rows hold tokens",
            )
        tokenizer = _loaded(self.file)
        for name in texts:
            made = IDS if len(texts) == 1 else f"{name}_{IDS}"
            if made != name and made in rows.column_names:
                raise DataError(
                    f"the tokens of column '{name}' would become the column '{made}', which exists",
                    where=where,
                    remedy=f"drop or rename '{made}' in data.transform",
                )
            rows = rows.set_column(rows.column_names.index(name), made, self._tokens(tokenizer, rows, name))
        return rows

    def _tokens(self, tokenizer: Any, rows: pa.Table, name: str) -> pa.ChunkedArray:
        column = rows.column(name)
        if column.null_count:
            raise DataError(
                f"column '{name}' holds {column.null_count} nulls, which have no tokens",
                where=f"data.tokenizer: {self.file.path}",
                remedy="drop these rows in data.prepare, or fill them in data.transform",
            )
        # One by one: `encode_batch` starts a thread for each CPU, beside the workers that share them, and a process
        # that has done so prints warnings when it forks.
        try:
            tokens = [tokenizer.encode(text).ids for text in column.to_pylist()]
        except Exception as error:
            # The package raises no errors of its own types.
            raise DataError(
                f"cannot make tokens of a text of column '{name}': {first_line(error)}",
                where=f"data.tokenizer: {self.file.path}",
                remedy="give the tokenizer a token for what it does not know (unk_token)",
            ) from None
        return pa.chunked_array([pa.array(tokens, pa.list_(pa.int64()))])


def tokenizer_file(path: str | Path) -> TokenizerFile:
    """Return the tokenizer of a folder, or a file, after a check that it can be loaded.

    Relative paths start at the working directory. Raises `DataError` if there is none, or it cannot be used, and
    `InputError` if the package tokenizers is missing.
    """
    file = find_tokenizer(path)
    found = TokenizerFile(str(file), hashlib.sha256(_read(file)).hexdigest())
    _loaded(found)
    return found


def find_tokenizer(path: str | Path) -> Path:
    """Return the file of the tokenizer in a folder, or a file, absolute. Raises `DataError` if there is none."""
    base = Path(path).absolute()
    file = base / FILE if base.is_dir() else base
    if not file.is_file():
        raise _missing(base)
    return file


@functools.lru_cache(maxsize=_LOADED)
def _loaded(file: TokenizerFile) -> Any:
    """Return a tokenizer that nobody changes, so that threads may share it."""
    content = _read(Path(file.path))
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataChanged(
            "the tokenizer changed while the run used it",
            where=f"data.tokenizer: {file.path}",
            remedy="restore the file and resume the run, or start over with --fresh",
        )
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise InputError(
            "the Python package 'tokenizers' is not installed",
            where="data.tokenizer",
            remedy='pip install "raytrain-plus[transformers]"',
        ) from None
    try:
        text = content.decode()
        tokenizer = Tokenizer.from_str(text)
        dropout = json.loads(text)["model"].get("dropout")
    except Exception as error:
        # What tokenizers raises has no type of its own.
        raise DataError(
            f"is not a readable tokenizer ({len(content):,} bytes): {first_line(error)}",
            where=f"data.tokenizer: {file.path}",
            remedy=_SAVED,
        ) from None
    if dropout:
        raise DataError(
            f"the tokenizer drops merges at random (dropout {dropout}), so that a text has other tokens each time",
            where=f"data.tokenizer: {file.path}",
            expected="a tokenizer without dropout",
            remedy='set "dropout" to null in the file',
        )
    tokenizer.no_padding()
    return tokenizer


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=f"data.tokenizer: {file}") from None


def _missing(base: Path) -> DataError:
    where = f"data.tokenizer: {base}"
    if not base.is_dir():
        return DataError(
            "there is no such file or folder", where=where, expected=f"a folder with {FILE}", remedy=_SAVED
        )
    others = [path.name for path in sorted(base.iterdir()) if path.is_file() and not path.name.startswith(".")]
    older = [name for name in others if name.endswith(".model") or name.startswith(("vocab.", "merges."))]
    if older:
        return DataError(
            f"has no {FILE}, only {', '.join(older[:3])}, the files of a slow tokenizer",
            where=where,
            expected=f"a folder with {FILE}",
            remedy="convert it with AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER)",
        )
    found = f", only {', '.join(others[:3])}{', ...' * (len(others) > 3)}" if others else " and no other file"
    return DataError(f"has no {FILE}{found}", where=where, expected=f"a folder with {FILE}", remedy=_SAVED)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
