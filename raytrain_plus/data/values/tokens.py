"""Make the numbers of tokens of text: the setting `data.tokenizer`."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from raytrain_plus.data.values.row_fault import RowFault
from raytrain_plus.errors import DataChanged, DataError, InputError, first_line

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
"""The file beside it that says which token ends a text."""
IDS, POSITIONS = "input_ids", "position_ids"
"""The columns of tokens, and of their numbers in their document."""
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

        Raises `RowFault` for a text that is null or that the tokenizer refuses, `DataError` if no column holds text or
        a new column has the name of another one, and `DataChanged` if the file has changed.
        """
        texts = [name for name in rows.column_names if is_text(rows.column(name).type)]
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
        tokens = []
        # One by one: `encode_batch` starts a thread for each CPU, beside the workers that share them, and a process
        # that has done so prints warnings when it forks.
        for row, text in enumerate(column.to_pylist()):
            if text is None:
                what = f"column '{name}' holds a null, which has no tokens"
                raise RowFault(row, what, "drop the row in data.prepare, or fill it in data.transform")
            try:
                tokens.append(tokenizer.encode(text).ids)
            except Exception as error:
                # The package raises no errors of its own types.
                found = _without_tokens(self.file, f"a text of column '{name}'", error)
                raise RowFault(row, f"{found.what} ({found.where})", found.remedy) from None
        return pa.chunked_array([pa.array(tokens, pa.list_(pa.int64()))])


def whole_tokens(file: TokenizerFile, texts: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the tokens of each text, all of them even if the tokenizer truncates; on all CPUs.

    Raises `DataError` if it cannot make tokens of a text, and `DataChanged` if the file has changed.
    """
    try:
        return [made.ids for made in _loaded(file, whole=True).encode_batch_fast(list(texts))]
    except DataError:
        raise
    except Exception as error:
        raise _without_tokens(file, "a text", error) from None


def end_token(file: TokenizerFile) -> int | None:
    """Return the token that ends a document: `eos_token` in the tokenizer's configuration; None if it names none.

    Raises `DataError` if that cannot be read, or names a token that the tokenizer does not have.
    """
    config = Path(file.path).with_name(CONFIG)
    if not config.is_file():
        return None
    where = f"data.tokenizer: {config}"
    try:
        named = json.loads(_read(config)).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"is not a JSON object: {first_line(error)}", where=where, remedy=_SAVED) from None
    name = named.get("content") if isinstance(named, dict) else named
    if name is None:
        return None
    found: int | None = _loaded(file).token_to_id(str(name))
    if found is None:
        raise DataError(
            f"its eos_token {name!r} is not among the tokens of {FILE}",
            where=where,
            remedy="save both files again with save_pretrained, or set eos_token to null",
        )
    return found


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
def _loaded(file: TokenizerFile, *, whole: bool = False) -> Any:
    """Return a tokenizer that nobody changes, so that threads may share it. `whole`: it truncates nothing."""
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
    if whole:
        tokenizer.no_truncation()
    return tokenizer


def _without_tokens(file: TokenizerFile, text: str, error: Exception) -> DataError:
    return DataError(
        f"cannot make tokens of {text}: {first_line(error)}",
        where=f"data.tokenizer: {file.path}",
        remedy="give the tokenizer a token for what it does not know (unk_token)",
    )


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


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds text."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
