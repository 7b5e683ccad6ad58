"""The header: what one shard writes reaches everyone with its bits unchanged."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.training.header import ShardReport, decode, encode, size


def test_sum_of_headers_is_the_step() -> None:
    left = encode({0: ShardReport(4, 4.0, 2.0), 1: ShardReport(4, 4.0, 6.0)}, shards=3, wishes_pause=False)
    right = encode({2: ShardReport(2, 8.0, 8.0)}, shards=3, wishes_pause=True)
    totals = decode(left + right)
    assert (totals.rows, totals.weight, totals.loss, totals.pause) == (10, 16.0, 1.0, True)
    assert totals.bad_shards == ()


def test_a_loss_that_is_not_finite_names_its_shards() -> None:
    reports = {0: ShardReport(1, 1.0, 1.0), 1: ShardReport(1, 1.0, math.nan), 3: ShardReport(1, 1.0, math.inf)}
    header = encode(reports, shards=4, wishes_pause=False)
    header += encode({2: ShardReport(1, 1.0, 1.0)}, shards=4, wishes_pause=False)
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
        mine = {k: ShardReport(1, 1.0, losses[k]) for k in range(shards) if host[k] == group}
        total += encode(mine, shards, wishes_pause=False)
    assert decode(total).loss == expected
