"""Join documents of any format to one stream of token numbers, once per node, and cut windows of it.

The stream is a file in the user's cache, the same for windows of any length.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from typing_extensions import override

from raytrain_plus.data.convert.cache import default_cache, made_once
from raytrain_plus.data.convert.conversion import Told, earlier, name_of
from raytrain_plus.data.convert.document_tokens import DocumentTokens, document_tokens
from raytrain_plus.data.convert.packed import Ints
from raytrain_plus.data.convert.parts import content_of, is_complete, part_name
from raytrain_plus.data.sources.converted_source import ConvertedSource
from raytrain_plus.data.sources.parquet_source import check_unchanged
from raytrain_plus.data.sources.source import Around, Source, facts_of
from raytrain_plus.data.sources.windows import WindowsSource, windows_of
from raytrain_plus.errors import DataError
from raytrain_plus.observe.views.conversion_view import conversion_view

SUFFIX = ".bin"
MOST = 2**31
"""Limit of the numbers of tokens, which are stored as int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSource(Around):
    """Windows of joined documents. `fingerprint`: over the documents, the tokenizer and all numbers too."""

    source: WindowsSource
    documents: Source = field(compare=False)
    tokens: DocumentTokens = field(compare=False)
    chosen: bool
    """Whether the job chooses the column of the documents."""

    @property
    @override
    def by_index(self) -> bool:
        return self.source.by_index

    @property
    @override
    def in_memory(self) -> bool:
        return self.source.in_memory

    @property
    @override
    def user_files(self) -> Mapping[str, int]:
        return self.documents.user_files

    @override
    def describe(self) -> dict[str, Any]:
        documents, tokenizer = self.documents, self.tokens.tokenizer
        origin = documents.origin if isinstance(documents, ConvertedSource) else None
        return {
            **self.source.describe(),
            **({"converted_from": self.named, "format": None} if origin is None else origin.describe()),
            "end_token": self.tokens.end,
            **({} if tokenizer is None else {"tokenizer_sha256": tokenizer.sha256}),
            "fingerprint": self.fingerprint,
        }


def joined(
    documents: Source,
    length: int,
    stride: int,
    tokenizer: str | Path | None,
    *,
    scattered: bool,
    chosen: bool = False,
    cache: Path | None = None,
) -> JoinedSource:
    """Return the source of the windows of all documents, one after the other; join them if they are not yet.

    `scattered`: see `WindowsSource`. `tokenizer`, `chosen`, `cache`: as for `packed`. Raises `DataError` if the
    documents cannot be joined, or are shorter than a window, and the errors of `tokenizer_file`.
    """
    tokens = document_tokens(documents.schema, documents.named, "data.windows", tokenizer)
    target = (cache or default_cache()) / _folder_name(documents, tokens, tokens.column if chosen else "")
    if not is_complete(target):
        name, again = Path(documents.named).name, len(earlier(target)) > 0
        with conversion_view(sys.stderr, name, again, ("joining", "joined"), "one stream") as told:
            made_once(target, documents.named, lambda partial: _write(documents, tokens, partial, told))
    count = (target / part_name(0, SUFFIX)).stat().st_size // 4
    if count <= length:
        raise DataError(
            f"its documents have {count:,} tokens in all, too few for a window of {length:,} and the token behind it",
            where=f"data.windows: {documents.named}",
            remedy="use more data, or a smaller data.windows",
        )
    source = windows_of(target, "int32", length, stride, scattered=scattered)
    file = tokens.tokenizer
    parts = [source.fingerprint, content_of(target), documents.fingerprint, "" if file is None else file.sha256]
    digest = hashlib.sha256("\0".join([*parts, str(tokens.end)]).encode()).hexdigest()
    facts = {**facts_of(source), "named": documents.named, "fingerprint": digest}
    return JoinedSource(**facts, source=source, documents=documents, tokens=tokens, chosen=chosen)


def _folder_name(documents: Source, tokens: DocumentTokens, choice: str) -> str:
    file = tokens.tokenizer
    tokenizer = "" if file is None else f"{file.sha256}\0{version('tokenizers')}"
    kind = f"joined\0{tokenizer}\0{tokens.end}\0{documents.named}\0{choice}"
    return name_of(Path(documents.named).stem, kind, documents.places, documents.fingerprint)


def _write(documents: Source, tokens: DocumentTokens, partial: Path, told: Told) -> None:
    """Write the tokens of all documents. Raises `DataError` if one is no token number, or a file has changed."""
    read, total = 0, sum(documents.unit_bytes)
    with (partial / part_name(0, SUFFIX)).open("wb") as opened:
        for unit, size in enumerate(documents.unit_bytes):
            for numbers in _numbers(documents, tokens, unit):
                opened.write(numbers.astype("<i4").tobytes())
            read += size
            told(read, total)
    check_unchanged(documents)


def _numbers(documents: Source, tokens: DocumentTokens, unit: int) -> Iterator[Ints]:
    """Yield the tokens of a unit's documents, slice by slice."""
    rows, name = documents.read_unit(unit), documents.name(unit)
    for numbers, _ in tokens.of(rows, name, lambda row: documents.name_rows(unit, [row])):
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < MOST:
            what = f"column '{tokens.column}' holds numbers that no token has"
            raise DataError(what, where=name, expected=f"numbers from 0 to {MOST - 1:,}")
        yield numbers
