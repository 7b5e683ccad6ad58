"""The sample order uses every row once an epoch, in steps of one size and spans that differ by at most one row."""

import pickle
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.data.order.reads import GROUP_READS, first_touches, grouped, reads
from raytrain_plus.data.order.sample_order import SampleOrder, mix, order, read_factor, splitmix64


@st.composite
def sample_orders(draw: st.DrawFn) -> SampleOrder:
    shards = draw(st.integers(1, 7))
    units = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    while sum(units) < shards:
        units.append(3)
    return SampleOrder(
        units,
        shards=shards,
        batch_size=shards * draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 2**40)),
        shuffle=draw(st.sampled_from(["none", "units", "rows"])),
        epochs=draw(st.integers(1, 4)),
    )


def rows_of(sample_order: SampleOrder, shard: int, step: int) -> list[tuple[int, int, int]]:
    """Return (epoch, unit, row in the file) of each row that the shard contributes to the step."""
    found = []
    for row_range in sample_order.row_ranges(shard, step):
        permutation = sample_order.permutation(row_range.epoch, row_range.unit)
        for row in range(row_range.start, row_range.start + row_range.rows):
            found.append((row_range.epoch, row_range.unit, row if permutation is None else int(permutation[row])))
    return found


@given(st.lists(st.integers(-(2**63), 2**70), min_size=1, max_size=5))
def test_one_number_is_mixed_as_an_array_of_them(parts: list[int]) -> None:
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = splitmix64(state + np.uint64(part % 2**64))
    assert mix(*parts) == int(state[0])


@given(sample_orders())
def test_every_row_is_used_once_an_epoch_and_steps_are_alike(sample_order: SampleOrder) -> None:
    used: Counter[tuple[int, int, int]] = Counter()
    for step in range(sample_order.steps):
        sizes = []
        for shard in range(sample_order.shards):
            rows = rows_of(sample_order, shard, step)
            assert len(rows) == sample_order.rows_in_step(shard, step)
            sizes.append(len(rows))
            used.update(rows)
        if step + 1 < sample_order.steps:
            assert set(sizes) == {sample_order.per_shard}
        else:
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= 1
    epochs = sample_order._epochs
    assert epochs is not None
    wanted = {(e, u, r) for e in range(epochs) for u, rows in enumerate(sample_order._unit_rows) for r in range(rows)}
    assert used == Counter(dict.fromkeys(wanted, 1))


@given(sample_orders(), st.integers(0, 5))
def test_spans_are_equal_within_one_row_and_lie_end_to_end(sample_order: SampleOrder, epoch: int) -> None:
    spans = [sample_order.span(shard, epoch) for shard in range(sample_order.shards)]
    at = 0
    for offset, length in spans:
        assert offset == at
        at += length
    assert at == sample_order.rows
    lengths = [length for _, length in spans]
    assert max(lengths) - min(lengths) <= 1
    for shard, length in enumerate(lengths):
        assert sample_order.rows_before(shard, epoch + 1) - sample_order.rows_before(shard, epoch) == length


@pytest.mark.parametrize(
    ("rows", "shards", "batch", "epochs", "steps", "last"),
    [
        (24, 2, 8, 1, 3, 4),  # no remainder
        (26, 2, 8, 1, 3, 5),  # one row left for each shard: it joins the last full step
        (25, 2, 8, 1, 3, 5),  # one row left for one shard alone: so too
        (28, 2, 8, 1, 4, 2),  # two rows left: a short step
        (6, 2, 8, 1, 1, 3),  # less than one full step
        (3, 2, 8, 1, 1, 2),
    ],
)
def test_the_last_step(rows: int, shards: int, batch: int, epochs: int, steps: int, last: int) -> None:
    sample_order = SampleOrder([rows], shards=shards, batch_size=batch, seed=0, epochs=epochs)
    assert (sample_order.steps, sample_order.rows_in_step(0, sample_order.steps - 1)) == (steps, last)


def test_a_job_that_counts_steps_has_equal_ones_over_epochs() -> None:
    sample_order = SampleOrder([5, 4], shards=2, batch_size=14, seed=3, steps=5)
    assert [sample_order.rows_in_step(1, step) for step in range(5)] == [7] * 5
    assert {row_range.epoch for row_range in sample_order.row_ranges(0, 0)} == {0, 1}


def test_order_follows_its_definition() -> None:
    """The order can be recomputed from its definition, by another version or language."""

    def splitmix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    key = splitmix64(splitmix64(splitmix64(7) + 1) + 4)
    assert mix(7, 1, 4) == key
    expected = sorted(range(50), key=lambda i: splitmix64((key + i) % 2**64))
    assert order(key, 50).tolist() == expected
    sample_order = SampleOrder([3] * 50, shards=2, batch_size=4, seed=7, epochs=9)
    assert sample_order.unit_order(4).tolist() == expected


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(SampleOrder([1] * 30, shards=1, batch_size=1, seed=s, epochs=1).unit_order(e))
        for s in (0, 1)
        for e in (0, 1)
    }
    assert len(orders) == 4


@given(sample_orders(), st.data())
def test_reads_give_each_shard_its_rows_in_order(sample_order: SampleOrder, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, sample_order.steps - 1))
    shards = data.draw(st.sets(st.integers(0, sample_order.shards - 1), min_size=1))
    wanted = list(reads(sample_order, shards, first))
    assert [read.number for read in wanted] == list(range(len(wanted)))
    assert [read.step for read in wanted] == sorted(read.step for read in wanted)
    for shard in shards:
        from_reads = [
            (read.row_range.epoch, read.row_range.unit, row)
            for read in wanted
            if read.shard == shard
            for row in range(read.row_range.start, read.row_range.start + read.row_range.rows)
        ]
        from_steps = [
            (row_range.epoch, row_range.unit, row)
            for step in range(first, sample_order.steps)
            for row_range in sample_order.row_ranges(shard, step)
            for row in range(row_range.start, row_range.start + row_range.rows)
        ]
        assert from_reads == from_steps


def test_groups_hold_what_fits_and_keep_the_order() -> None:
    sample_order = SampleOrder([10] * 6, shards=1, batch_size=10, seed=0, shuffle="none", epochs=1)
    groups = list(grouped(reads(sample_order, [0], 0), lambda read: 12 << 20))
    assert [[read.number for read in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]


def test_a_group_of_tiny_reads_is_soon_full() -> None:
    sample_order = SampleOrder([7] * 9, shards=3, batch_size=36, seed=0, steps=10**9)
    groups = list(islice(grouped(reads(sample_order, [0, 2], 0), lambda read: 1.0), 3))
    assert [len(group) for group in groups] == [GROUP_READS] * 3
    assert [read.number for group in groups for read in group] == list(range(3 * GROUP_READS))


def test_first_touches_ends_when_all_units_were_touched() -> None:
    sample_order = SampleOrder([4, 4, 4], shards=2, batch_size=4, seed=0, steps=10**9)
    assert sorted(read.row_range.unit for read in first_touches(reads(sample_order, [1], 0), {0, 2})) == [0, 2]


def test_first_touches_ends_if_some_units_are_never_touched() -> None:
    # Without shuffling, the second of two shards only ever sees the second half.
    sample_order = SampleOrder([4, 4, 4, 4], shards=2, batch_size=4, seed=0, shuffle="none", steps=10**9)
    assert [read.row_range.unit for read in first_touches(reads(sample_order, [1], 0), {0, 1, 2, 3})] == [2, 3]


def test_a_sample_order_is_pickled_without_its_tables() -> None:
    sample_order = SampleOrder([4, 4, 4], shards=2, batch_size=4, seed=0, steps=100)
    fresh = len(pickle.dumps(sample_order))
    before = [sample_order.row_ranges(1, step) for step in range(20)]
    assert len(pickle.dumps(sample_order)) == fresh
    again = pickle.loads(pickle.dumps(sample_order))
    assert [again.row_ranges(1, step) for step in range(20)] == before


def test_read_factor() -> None:
    assert read_factor(SampleOrder([6] * 4, shards=4, batch_size=4, seed=0, epochs=1), 4) == 1.0
    assert read_factor(SampleOrder([24], shards=4, batch_size=4, seed=0, epochs=1), 1) == 4.0


def test_a_hundred_thousand_units_are_quick() -> None:
    sample_order = SampleOrder(np.full(100_000, 1000), shards=64, batch_size=64 * 32, seed=0, epochs=2)
    last = sample_order.steps - 1
    assert sum(one.rows for one in sample_order.row_ranges(63, last)) == sample_order.rows_in_step(63, last)
