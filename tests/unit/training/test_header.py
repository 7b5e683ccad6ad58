"""The header passes the bits that one shard writes to every worker unchanged."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.data.ledger.ledger import NOTE
from raytrain_plus.training.exchange.header import Flags, ShardReport, decode, either, encode, size


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


@given(st.lists(st.builds(Flags, *[st.booleans()] * len(Flags._fields)), min_size=1, max_size=9))
def test_each_flag_is_that_of_any_worker(raised: list[Flags]) -> None:
    total = sum(encode({}, 2, flags) for flags in raised)
    assert isinstance(total, np.ndarray)
    assert decode(total).flags == either(raised)


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
