"""The tokens of documents, one in each row of one column: text that a tokenizer reads, or lists of token numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytrain_plus.data.convert.packed import Ints, slices, with_ends
from raytrain_plus.data.values.tokens import TokenizerFile, end_token, is_text, tokenizer_file, whole_tokens
from raytrain_plus.errors import DataError, first_line

SLICE_BYTES = 2 << 20
"""Bytes of documents that are made tokens of at once; a larger document by itself."""


@dataclass(frozen=True, slots=True)
class DocumentTokens:
    """Makes tokens of documents."""

    column: str
    """The column that holds the documents."""
    tokenizer: TokenizerFile | None
    """None for documents of tokens."""
    end: int | None
    """The token that ends each document, if there is one."""

    def of(self, rows: pa.Table, name: str, name_row: Callable[[int], str]) -> Iterator[tuple[Ints, Ints]]:
        """Yield the tokens of documents, one after the other, and their lengths, slice by slice.

        `name`, `name_row`: of the rows, and of one of them, for messages. Raises `DataError` if a document is null or
        holds no tokens.
        """
        column = rows.column(self.column)
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise DataError(
                f"column '{self.column}' is null, so there is no document",
                where=name_row(row),
                remedy="drop such rows, in data.prepare for example",
            )
        text = is_text(column.type)
        column = column.cast(pa.large_string() if text else pa.large_list(column.type.value_type))
        sizes = pc.binary_length(column) if text else pc.multiply(pc.list_value_length(column), 8)
        encoded = self._of_text if text else _of_lists
        for begin, end in slices(sizes.to_numpy(), SLICE_BYTES):
            try:
                tokens, lengths = encoded(column.slice(begin, end - begin))
            except pa.ArrowInvalid as error:
                what = f"column '{self.column}' holds no token numbers: {first_line(error)}"
                raise DataError(what, where=name) from None
            yield with_ends(tokens, lengths, self.end)

    def _of_text(self, column: pa.ChunkedArray) -> tuple[Ints, Ints]:
        assert self.tokenizer is not None
        found = whole_tokens(self.tokenizer, column.to_pylist())
        lengths = np.array([len(tokens) for tokens in found], np.int64)
        return np.concatenate([np.array(tokens, np.int64) for tokens in found]), lengths


def document_tokens(schema: pa.Schema, named: str, setting: str, tokenizer: str | Path | None) -> DocumentTokens:
    """Return what makes tokens of the only column of these that can hold documents.

    `named`, `setting`: the data, and what asks for tokens, such as `data.pack`. `tokenizer`: as `tokenizer_file` takes
    it, or None for documents of tokens. Raises `DataError` if there is no such column, or several, or no tokenizer, and
    the errors of `tokenizer_file`.
    """
    file = None if tokenizer is None else tokenizer_file(tokenizer)
    fields: dict[str, pa.DataType] = {field.name: field.type for field in schema}
    found = [name for name, kind in fields.items() if is_text(kind) or _is_tokens(kind)]
    if len(found) != 1:
        several = f"{len(found)} columns could hold the documents: {', '.join(found)}"
        raise DataError(
            several if found else "no column holds documents",
            where=f"{setting}: {named}",
            expected="one column of text or of lists of token numbers"
            + ("" if found else " among " + ", ".join(f"{name} ({kind})" for name, kind in fields.items())),
            remedy="leave out the others" if found else "",
        )
    if file is None and is_text(fields[found[0]]):
        raise DataError(
            f"column '{found[0]}' holds text, and {setting} needs tokens",
            where=f"{setting}: {named}",
            remedy="name the folder of a tokenizer in data.tokenizer",
        )
    return DocumentTokens(found[0], file, None if file is None else end_token(file))


def _is_tokens(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(lists and pa.types.is_integer(kind.value_type))


def _of_lists(column: pa.ChunkedArray) -> tuple[Ints, Ints]:
    values = pc.list_flatten(column)
    if values.null_count:
        raise pa.ArrowInvalid("a number is null")
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    return values.cast(pa.int64()).to_numpy(), lengths
