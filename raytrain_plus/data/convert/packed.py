"""Pack the tokens of documents into rows of one length. Pure.

Documents follow one another without gaps, so a row begins at any token of any document. The place of that token is all
that is needed to begin again there: nothing of an earlier row is left over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raytrain_plus.data.values.tokens import TokenizerFile

Ints = npt.NDArray[np.int64]


class TokenPlace(NamedTuple):
    """The place of a token in the documents."""

    unit: int
    """The unit that its document belongs to."""
    token: int
    """Its number among the tokens of all documents of that unit."""


class PackedRows(NamedTuple):
    """Consecutive rows."""

    tokens: Ints
    """Shape (rows, length)."""
    positions: Ints
    """Shape (rows, length): the number of each token in its document."""
    place: TokenPlace
    """Of their first token."""


class Packer:
    """Cuts tokens, in order, into rows of `length` of them; keeps those that do not fill a row yet."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._tokens = self._positions = np.empty(0, np.int64)
        self._place = TokenPlace(0, 0)

    @property
    def left(self) -> int:
        """The number of tokens that do not fill a row."""
        return len(self._tokens)

    def add(self, tokens: Ints, positions: Ints, place: TokenPlace) -> PackedRows | None:
        """Take the next tokens, of one unit; return the rows that they complete. `place`: of the first one."""
        if not len(tokens):
            return None
        kept = self.left
        if not kept:
            self._place = place
        self._tokens = np.concatenate([self._tokens, tokens])
        self._positions = np.concatenate([self._positions, positions])
        rows = len(self._tokens) // self._length
        if not rows:
            return None
        used, shape = rows * self._length, (rows, self._length)
        made = PackedRows(self._tokens[:used].reshape(shape), self._positions[:used].reshape(shape), self._place)
        # Copies, so that they do not keep the rows in memory. Fewer than a row were kept before.
        self._tokens, self._positions = self._tokens[used:].copy(), self._positions[used:].copy()
        self._place = TokenPlace(place.unit, place.token + used - kept)
        return made


def with_ends(tokens: Ints, lengths: Ints, end: int | None) -> tuple[Ints, Ints]:
    """Append `end` to each document that does not end with it; return all tokens, and the lengths of the documents.

    `tokens`: of all documents, one after the other. `end`: None to append nothing.
    """
    if end is None:
        return tokens, lengths
    stops = np.cumsum(lengths)
    last = np.full(len(lengths), -1, np.int64)
    filled = lengths > 0
    last[filled] = tokens[stops[filled] - 1]
    missing = ~filled | (last != end)
    return np.insert(tokens, stops[missing], end), lengths + missing


def positions_of(lengths: Ints) -> Ints:
    """Return the number of each token in its document, for documents of these lengths."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)


def slices(sizes: Sequence[int] | Ints, most: int) -> Iterator[tuple[int, int]]:
    """Divide documents of these sizes into slices [begin, end) of at most `most` in all, or of a single document."""
    begin, size = 0, 0
    for number, own in enumerate(sizes):
        if number > begin and size + own > most:
            yield begin, number
            begin, size = number, 0
        size += int(own)
    if begin < len(sizes):
        yield begin, len(sizes)


@dataclass(frozen=True, slots=True)
class Packed:
    """How rows of one length were packed: the setting `data.pack`."""

    length: int
    """Tokens of a row."""
    tokenizer: TokenizerFile | None
    """What made tokens of the documents' text, or says what ends them; None for documents of tokens without an end."""
    end: int | None
    """The token that ends each document, if there is one."""
    documents: int
    fingerprint: str
    """Of the data that holds the documents."""
    dropped: int
    """The last tokens of all documents, which fill no row."""
    chosen: str = ""
    """The column of the documents, if the job chooses columns; empty if the only one that can be packed is taken."""

    def to_json(self) -> dict[str, Any]:
        """Return a description with which later checks can compare it."""
        return {
            "length": self.length,
            "end_token": self.end,
            "documents": self.documents,
            "documents_fingerprint": self.fingerprint,
            "dropped_tokens": self.dropped,
        }

    def line(self) -> str:
        """Return a line of text for a person."""
        end = "no end token" if self.end is None else f"the end token {self.end}"
        documents = f"{self.documents:,} document{'s' * (self.documents != 1)}"
        plural = self.dropped != 1
        left = (
            f"the last {self.dropped:,} token{'s' * plural} {'fill' if plural else 'fills'} no row and "
            f"{'are' if plural else 'is'} dropped"
            if self.dropped
            else "no token is left over"
        )
        return f"{documents}, with {end}, packed in rows of {self.length:,} tokens; {left}"


def changes_of_packed(now: Mapping[str, Any] | None, then: Mapping[str, Any] | None) -> list[str]:
    """Describe how two `Packed.to_json` differ, beside the files of the rows."""
    if now is None or then is None:
        return [] if now == then else ["only one of them is packed"]
    found = []
    if now.get("end_token") != then.get("end_token"):
        found.append("data.tokenizer names another token that ends a document")
    if now.get("documents_fingerprint") != then.get("documents_fingerprint"):
        found.append("the documents have changed")
    return found
