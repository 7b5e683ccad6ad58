"""A row's id is what the docstring says, on any machine and in any version."""

import hashlib

import pytest

from raytrain_plus.data.ledger import NOTE, row_ids


def splitmix64(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize(("file", "group"), [("a.parquet", 0), ("ordner/ü.parquet", 7)])
def test_ids_are_the_documented_ones(file: str, group: int) -> None:
    key = int.from_bytes(hashlib.sha256(file.encode()).digest()[:8], "little")
    start = splitmix64((key + group) % 2**64)
    expected = [splitmix64((start + place) % 2**64) >> 32 for place in range(5)]
    assert row_ids(file, group, 5).tolist() == expected


def test_ids_of_other_rows_are_others() -> None:
    ids = [value for file in ("a", "b") for group in range(3) for value in row_ids(file, group, 500).tolist()]
    assert len(set(ids)) == len(ids)
    assert max(ids) < 2**32


def test_a_note_takes_forty_bytes() -> None:
    assert NOTE.itemsize == 40
