"""Convert documents of any format into rows of one length, once per node, into Parquet in the user's cache.

The documents are read in order, from their files, from what these were converted to, or by index. A conversion that was
killed continues after its last complete part.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

from raytrain_plus.data.convert.cache import default_cache, made_once
from raytrain_plus.data.convert.conversion import Told, earlier, name_of
from raytrain_plus.data.convert.document_tokens import DocumentTokens, document_tokens
from raytrain_plus.data.convert.formats.record_blocks import RecordBlock
from raytrain_plus.data.convert.packed import (
    Ints,
    Packed,
    PackedRows,
    Packer,
    TokenPlace,
    positions_of,
)
from raytrain_plus.data.convert.parts import (
    ConvertedParts,
    Progress,
    begin_again,
    group_rows_of,
    is_complete,
    load_progress,
)
from raytrain_plus.data.sources.converted_source import ConvertedSource
from raytrain_plus.data.sources.parquet_source import check_unchanged, parquet_source
from raytrain_plus.data.sources.source import Around, Source, facts_of
from raytrain_plus.data.values.tokens import IDS, POSITIONS, TokenizerFile
from raytrain_plus.errors import DataChanged, DataError
from raytrain_plus.observe.views.conversion_view import conversion_view

_VERSION = 1
"""Raised when the same documents are to be packed differently."""
_LEFT = "_left"
"""The file with the number of tokens that are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSource(Around):
    """Rows of one length: `source` has their files. `fingerprint`: over the documents and the tokenizer too."""

    documents: Source = field(compare=False)
    packing: Packed = field(compare=False)

    @property
    @override
    def user_files(self) -> Mapping[str, int]:
        return self.documents.user_files

    @override
    def describe(self) -> dict[str, Any]:
        documents, tokenizer = self.documents, self.packing.tokenizer
        origin = documents.origin if isinstance(documents, ConvertedSource) else None
        form = None if documents.by_index else "parquet"
        return {
            **self.source.describe(),
            **({"converted_from": self.named, "format": form} if origin is None else origin.describe()),
            "packed": self.packing.to_json(),
            **({} if tokenizer is None else {"tokenizer_sha256": tokenizer.sha256}),
            "fingerprint": self.fingerprint,
        }


def packed(
    documents: Source, length: int, tokenizer: str | Path | None, *, chosen: bool = False, cache: Path | None = None
) -> PackedSource:
    """Return the source of rows of `length` tokens, packed from documents; pack them if they are missing, and say so.

    `tokenizer`: as `tokenizer_file` takes it, or None for documents of tokens. `chosen`: whether the job chooses the
    column, so that rows of another one are others. `cache`: the folder of converted data; None for the user's. Raises
    `DataError` if the documents cannot be packed, and the errors of `tokenizer_file`.
    """
    tokens = document_tokens(documents.schema, documents.named, "data.pack", tokenizer)
    file, end = tokens.tokenizer, tokens.end
    choice = tokens.column if chosen else ""
    target = (cache or default_cache()) / _folder_name(documents, length, file, end, choice)
    made = False
    if not is_complete(target):
        name, again = Path(documents.named).name, len(earlier(target)) > 0
        with conversion_view(sys.stderr, name, again, ("packing", "packed")) as told:
            writing = _Writing(documents, tokens, length, told)
            made_once(target, documents.named, writing.into)
            made = writing.done
    source = parquet_source(target)
    found = Packed(length, file, end, documents.rows, documents.fingerprint, int((target / _LEFT).read_text()), choice)
    if made:
        print(f"{documents.named}: {found.line()}", file=sys.stderr, flush=True)
        if documents.by_index:
            print(f"its rows are in {target}; delete it to pack them again", file=sys.stderr, flush=True)
    parts = [source.fingerprint, documents.fingerprint, "" if file is None else file.sha256, str(end)]
    both = "\0".join([*parts, choice] if chosen else parts)
    facts = {
        **facts_of(source),
        "named": documents.named,
        "fingerprint": hashlib.sha256(both.encode()).hexdigest(),
    }
    return PackedSource(**facts, source=source, documents=documents, packing=found)


def _folder_name(documents: Source, length: int, file: TokenizerFile | None, end: int | None, choice: str) -> str:
    tokenizer = "" if file is None else f"{file.sha256}\0{version('tokenizers')}"
    kind = f"packed\0{_VERSION}\0{length}\0{tokenizer}\0{end}\0{pa.__version__}\0{documents.named}"
    kind += f"\0{choice}" if choice else ""
    return name_of(Path(documents.named).stem, kind, documents.places, documents.fingerprint)


class _Writing:
    """Packs documents into the parts of a folder."""

    def __init__(
        self,
        documents: Source,
        tokens: DocumentTokens,
        length: int,
        told: Told,
    ) -> None:
        self._documents = documents
        self._tokens = tokens
        self._length = length
        self._told = told
        self.done = False
        """Whether this process has written the last part."""

    def into(self, partial: Path) -> None:
        """Write all parts, or those that an earlier process has not written.

        Raises `DataError` if there is not a whole row, if a document holds no tokens, or if a file has changed.
        """
        progress = load_progress(partial) or begin_again(partial, self._none())
        parts, packer = ConvertedParts(partial, progress), Packer(self._length)
        try:
            for rows, read in self._rows(packer, TokenPlace(progress.file, progress.begin)):
                parts.add(RecordBlock(self._table(rows), rows.place.token, read), rows.place.unit)
            check_unchanged(self._documents)
        except DataChanged as error:
            if error.first is None:
                raise
            raise DataError(
                "the file changed while its documents were packed",
                where=error.where,
                remedy="run again when it no longer changes",
            ) from error
        parts.end()
        if not parts.progress.parts:
            raise DataError(
                f"its documents have {packer.left:,} tokens in all, too few for a row of {self._length:,}",
                where=f"data.pack: {self._documents.named}",
                remedy="use more data, or a smaller data.pack",
            )
        (partial / _LEFT).write_text(str(packer.left))
        self.done = True

    def _none(self) -> Progress:
        """Return the progress of a conversion that has not begun."""
        kind = pa.list_(pa.int64(), self._length)
        schema = pa.schema([(IDS, kind), (POSITIONS, kind)])
        # A part is in memory as a whole, so a long row is a group by itself.
        return replace(Progress.of(schema), group_rows=group_rows_of(2 * 8 * self._length, least=1))

    def _table(self, rows: PackedRows) -> pa.Table:
        columns = {IDS: rows.tokens, POSITIONS: rows.positions}
        flat = {name: pa.array(values.reshape(-1)) for name, values in columns.items()}
        return pa.table({name: pa.FixedSizeListArray.from_arrays(flat[name], self._length) for name in columns})

    def _rows(self, packer: Packer, start: TokenPlace) -> Iterator[tuple[PackedRows, int]]:
        """Yield rows from a place on, and the bytes of the documents that have been read."""
        sizes = self._documents.unit_bytes
        read = sum(sizes[: start.unit])
        for unit in range(start.unit, len(sizes)):
            at = 0
            for tokens, positions in self._documents_of(unit):
                cut = min(len(tokens), max(0, start.token - at)) if unit == start.unit else 0
                rows = packer.add(tokens[cut:], positions[cut:], TokenPlace(unit, at + cut))
                at += len(tokens)
                if rows is not None:
                    yield rows, read
            read += sizes[unit]
            self._told(read, sum(sizes))

    def _documents_of(self, unit: int) -> Iterator[tuple[Ints, Ints]]:
        """Yield the tokens of a unit's documents, and their numbers in their documents, slice by slice."""
        documents = self._documents
        rows, name = documents.read_unit(unit), documents.name(unit)
        for tokens, lengths in self._tokens.of(rows, name, lambda row: documents.name_rows(unit, [row])):
            yield tokens, positions_of(lengths)
