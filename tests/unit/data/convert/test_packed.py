"""Rows of one length hold the tokens of all documents, in order, and begin again at any row."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.data.convert.packed import PackedRows, Packer, TokenPlace, positions_of, slices, with_ends

DOCUMENTS = st.lists(st.lists(st.integers(0, 5), max_size=9), max_size=30)
UNITS = st.lists(DOCUMENTS, max_size=5)
BEGIN = TokenPlace(0, 0)


def flat(documents: list[list[int]], end: int | None) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    tokens = np.array([token for document in documents for token in document], np.int64)
    tokens, lengths = with_ends(tokens, np.array(list(map(len, documents)), np.int64), end)
    return tokens, positions_of(lengths)


def packed(
    units: list[list[list[int]]], length: int, end: int | None, most: int, start: TokenPlace = BEGIN
) -> tuple[list[PackedRows], int]:
    """Pack documents, slice by slice, from a place on; return the rows and the number of tokens that are left."""
    packer, made = Packer(length), list[PackedRows]()
    for unit, documents in enumerate(units):
        if unit < start.unit:
            continue
        at = 0
        for begin, stop in slices(list(map(len, documents)), most):
            tokens, positions = flat(documents[begin:stop], end)
            cut = min(len(tokens), max(0, start.token - at)) if unit == start.unit else 0
            rows = packer.add(tokens[cut:], positions[cut:], TokenPlace(unit, at + cut))
            at += len(tokens)
            made += [] if rows is None else [rows]
    return made, packer.left


def joined(rows: list[PackedRows], name: str) -> list[int]:
    return [value for one in rows for row in getattr(one, name).tolist() for value in row]


@given(UNITS, st.integers(2, 12), st.sampled_from([None, 0, 9]), st.integers(1, 40))
def test_rows_and_what_is_left_are_the_documents(
    units: list[list[list[int]]], length: int, end: int | None, most: int
) -> None:
    tokens, positions = [], []
    for documents in units:
        for document in documents:
            whole = document if end is None or document[-1:] == [end] else [*document, end]
            tokens += whole
            positions += range(len(whole))
    rows, left = packed(units, length, end, most)
    kept = len(tokens) // length * length
    assert joined(rows, "tokens") == tokens[:kept]
    assert joined(rows, "positions") == positions[:kept]
    assert left == len(tokens) - kept
    assert all(one.tokens.shape == one.positions.shape == (len(one.tokens), length) for one in rows)


@given(UNITS, st.integers(2, 12), st.sampled_from([None, 0, 9]), st.integers(1, 40), st.data())
def test_it_begins_again_where_any_rows_begin(
    units: list[list[list[int]]], length: int, end: int | None, most: int, data: st.DataObject
) -> None:
    rows, left = packed(units, length, end, most)
    if rows:
        number = data.draw(st.integers(0, len(rows) - 1))
        again, left_again = packed(units, length, end, data.draw(st.integers(1, 40)), rows[number].place)
        for name in ("tokens", "positions"):
            assert joined(again, name) == joined(rows[number:], name)
        assert left_again == left


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 60))
def test_slices_are_as_large_as_they_may_be(sizes: list[int], most: int) -> None:
    found = list(slices(sizes, most))
    assert [number for begin, end in found for number in range(begin, end)] == list(range(len(sizes)))
    for begin, end in found:
        assert end - begin == 1 or sum(sizes[begin:end]) <= most
    for (begin, end), _ in pairwise(found):
        assert sum(sizes[begin : end + 1]) > most


def test_a_document_longer_than_rows_spans_them() -> None:
    rows, left = packed([[[1, 2, 3, 4, 5, 6, 7], [8]]], 3, 0, 100)
    assert joined(rows, "tokens") == [1, 2, 3, 4, 5, 6, 7, 0, 8]
    assert joined(rows, "positions") == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert left == 1
