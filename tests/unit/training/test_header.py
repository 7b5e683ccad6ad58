"""The header passes the bits that one shard writes to every worker unchanged."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.data.ledger import NOTE
from raytrain_plus.training.header import Flags, ShardReport, decode, digits, encode, from_digits, size, to_digits


def test_sum_of_headers_is_the_step() -> None:
    left = encode({0: ShardReport(0, 4, 10, 4.0, 2.0), 1: ShardReport(8, 4, 11, 4.0, 6.0)}, shards=3, flags=Flags())
    right = encode({2: ShardReport(16, 2, 12, 8.0, 8.0)}, shards=3, flags=Flags(pause=True, busy=True))
    totals = decode(left + right)
    assert (totals.rows, totals.weight, totals.loss, totals.flags) == (
        10,
        16.0,
        1.0,
        Flags(pause=True, busy=True),
    )
    assert totals.bad_shards == ()
    notes = np.frombuffer(totals.notes, NOTE)
    assert notes["start"].tolist() == [0, 8, 16]
    assert notes["ids"].tolist() == [10, 11, 12]


def test_shards_with_a_nonfinite_loss_are_named() -> None:
    reports = {
        0: ShardReport(0, 1, 7, 1.0, 1.0),
        1: ShardReport(0, 1, 7, 1.0, math.nan),
        3: ShardReport(0, 1, 7, 1.0, math.inf),
    }
    header = encode(reports, shards=4, flags=Flags())
    header += encode({2: ShardReport(0, 1, 7, 1.0, 1.0)}, shards=4, flags=Flags())
    assert decode(header).bad_shards == (1, 3)


@given(
    losses=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    groups=st.integers(1, 4),
)
def test_the_loss_has_the_same_bits_however_shards_are_hosted(losses: list[float], order: object, groups: int) -> None:
    shards = len(losses)
    expected = sum(losses) / shards
    host = [order.randrange(groups) for _ in losses]  # type: ignore[attr-defined]
    total = np.zeros(size(shards), dtype=np.int64)
    for group in range(groups):
        mine = {k: ShardReport(0, 1, 7, 1.0, losses[k]) for k in range(shards) if host[k] == group}
        total += encode(mine, shards, Flags())
    assert decode(total).loss == expected


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@given(losses=st.lists(st.floats(), min_size=2, max_size=6), workers=st.integers(2, 5))
def test_digits_are_summed_without_losing_a_bit(dtype: str, losses: list[float], workers: int) -> None:
    shards = len(losses)
    headers = [
        encode(
            {k: ShardReport(2**40, 7, 2**64 - 1 - k, 0.1, losses[k]) for k in range(worker, shards, workers)},
            shards,
            Flags(pause=worker == 1, save=True),
        )
        for worker in range(workers)
    ]
    parts = [torch.from_numpy(to_digits(header, dtype)).to(getattr(torch, dtype)) for header in headers]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert len(total) == digits(shards, dtype)
    summed = from_digits(total.to(torch.float64).numpy(), dtype)
    assert summed.tolist() == sum(headers).tolist()  # type: ignore[union-attr]
    assert np.frombuffer(decode(summed).notes, NOTE)["ids"].tolist() == [2**64 - 1 - k for k in range(shards)]


def test_a_pause_flag_of_very_many_workers_does_not_overflow() -> None:
    header = encode({}, 1, Flags(pause=True))
    assert decode(from_digits(to_digits(header, "float32") * 65536, "float32")).flags == Flags(pause=True)
