"""A row's id matches the docstring, on any machine and in any version."""

import hashlib

import numpy as np
import pytest

from raytrain_plus.data.ledger.ledger import NOTE, kept_bits, row_ids, step_sum


def splitmix64(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize(("file", "group"), [("a.parquet", 0), ("ordner/ü.parquet", 7)])
def test_ids_are_the_documented_ones(file: str, group: int) -> None:
    key = int.from_bytes(hashlib.sha256(file.encode()).digest()[:8], "little")
    start = splitmix64((key + group) % 2**64)
    expected = [splitmix64((start + place) % 2**64) for place in range(5)]
    assert row_ids(file, group, 5).tolist() == expected


def test_ids_differ_between_rows() -> None:
    ids = [value for file in ("a", "b") for group in range(3) for value in row_ids(file, group, 500).tolist()]
    assert len(set(ids)) == len(ids)


def test_a_note_keeps_fewer_bits_the_more_shards_there_are() -> None:
    kept = {shards: kept_bits(shards) for shards in (1, 6, 8, 12, 64, 195, 196, 4096)}
    assert kept == {1: 64, 6: 64, 8: 47, 12: 31, 64: 5, 195: 1, 196: 0, 4096: 0}


def test_a_step_sum_is_the_documented_one_and_depends_on_the_shards() -> None:
    ids = [2**64 - 1, 5, 2**63]
    expected = sum(splitmix64((value + shard) % 2**64) for shard, value in enumerate(ids)) % 2**64
    assert int(step_sum(np.array(ids, np.uint64))) == expected
    assert step_sum(np.array([ids, ids[::-1]], np.uint64)).tolist() != [expected] * 2


def test_a_note_takes_forty_bytes() -> None:
    assert NOTE.itemsize == 48
