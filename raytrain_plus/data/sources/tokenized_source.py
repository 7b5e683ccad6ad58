"""Rows whose text becomes the numbers of tokens after `transform`: the setting `data.tokenizer`.

The tokens are made by `RowReader`; here is only what makes these rows other rows than those with text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from raytrain_plus.data.sources.source import Around, Source, facts_of
from raytrain_plus.data.values.tokens import TokenizerFile, tokenizer_file


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedSource(Around):
    """See the module docstring. `fingerprint`: over the digest of the tokenizer too."""

    tokenizer: TokenizerFile = field(compare=False)
    """Its path differs from node to node, if at all."""

    @property
    @override
    def parts(self) -> tuple[Source, ...]:
        return self.source.parts

    @property
    @override
    def by_index(self) -> bool:
        return self.source.by_index

    @override
    def describe(self) -> dict[str, Any]:
        return {
            **self.source.describe(),
            "tokenizer_sha256": self.tokenizer.sha256,
            "fingerprint": self.fingerprint,
        }

    @override
    def owner(self, unit: int) -> tuple[Source, int]:
        return self.source.owner(unit)


def tokenized(source: Source, path: str | Path | None) -> Source:
    """Return the source of the same rows with tokens in place of text, if `path` names a tokenizer.

    Raises the errors of `tokenizer_file`.
    """
    if path is None:
        return source
    file = tokenizer_file(path)
    both = hashlib.sha256(f"{source.fingerprint}\0{file.sha256}".encode()).hexdigest()
    return TokenizedSource(**{**facts_of(source), "fingerprint": both}, source=source, tokenizer=file)
