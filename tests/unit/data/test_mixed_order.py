"""A mix uses each source's rows once an epoch of that source, in fixed proportions."""

import math
import pickle
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.data.order.mixed_order import PATTERN, MixedOrder, apportioned, pattern_of
from raytrain_plus.data.order.reads import first_touches, reads
from raytrain_plus.data.order.sample_order import RowRange, SampleOrder, mix

Row = tuple[int, int, int]
"""Epoch, unit, and row in the unit's order of that epoch."""


@st.composite
def mixed_orders(draw: st.DrawFn) -> MixedOrder:
    shards = draw(st.integers(1, 5))
    count = draw(st.integers(2, 4))
    units = [draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)) for _ in range(count)]
    weights = draw(
        st.lists(st.one_of(st.integers(1, 9), st.floats(0.01, 1.0)), min_size=count, max_size=count),
    )
    return MixedOrder(
        units,
        weights,
        shards=shards,
        batch_size=shards * draw(st.integers(1, 7)),
        seed=draw(st.integers(0, 2**40)),
        shuffle=draw(st.sampled_from(["none", "units", "rows"])),
        steps=draw(st.integers(1, 25)),
    )


def rows_of(ranges: tuple[RowRange, ...]) -> list[Row]:
    return [(one.epoch, one.unit, row) for one in ranges for row in range(one.start, one.start + one.rows)]


def source_of(order: MixedOrder, unit: int) -> int:
    ends = [sum(len(one._unit_rows) for one in order.source_orders[: n + 1]) for n in range(len(order.source_orders))]
    return next(source for source, end in enumerate(ends) if unit < end)


@pytest.mark.parametrize(
    ("weights", "places"),
    [
        ([3, 1], (3, 1)),
        ([0.75, 0.25], (3, 1)),
        ([0.1, 0.2, 0.7], (1, 2, 7)),
        ([2, 2], (1, 1)),
        ([1, 9999], (1, 9999)),
        ([1e-5, 3e-5], (1, 3)),
        # Beyond 10,000 places: 3333.3 each.
        ([100_003, 100_003, 100_004], (3333, 3333, 3334)),
        ([1, 20_001], (0, 10_000)),
    ],
)
def test_weights_are_apportioned(weights: list[float], places: tuple[int, ...]) -> None:
    assert apportioned(weights) == places


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=16))
def test_places_are_the_weights_within_one(weights: list[float]) -> None:
    places = apportioned(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    assert sum(places) <= PATTERN
    for weight, count in zip(weights, places, strict=True):
        assert abs(Fraction(count, sum(places)) - Fraction(str(weight)) / total) < Fraction(1, PATTERN)


def test_the_pattern_follows_its_definition() -> None:
    """The pattern can be recomputed from its definition, by another version or language."""
    places = (5, 3, 3)
    wanted = sorted((Fraction(2 * j + 1, 2 * n), source) for source, n in enumerate(places) for j in range(n))
    assert pattern_of(places).tolist() == [source for _, source in wanted]
    assert pattern_of((3, 1)).tolist() == [0, 0, 1, 0]


@given(mixed_orders())
def test_every_row_of_a_source_is_used_once_in_each_of_its_epochs(order: MixedOrder) -> None:
    used = Counter(
        row
        for step in range(order.steps)
        for shard in range(order.shards)
        for row in rows_of(order.row_ranges(shard, step))
    )
    assert set(used.values()) == {1}
    assert sum(used.values()) == order.steps * order.shards * order.per_shard
    first = 0
    for source, own in enumerate(order.source_orders):
        lengths = own._unit_rows.tolist()
        mine = {(epoch, unit - first, row) for epoch, unit, row in used if first <= unit < first + len(lengths)}
        # Epochs that every shard has left behind are complete.
        full = 0
        while all(
            own.rows_before(shard, full + 1) <= order.used_before(shard, order.steps, source)
            for shard in range(order.shards)
        ):
            full += 1
        assert {row for row in mine if row[0] < full} == {
            (epoch, unit, row) for epoch in range(full) for unit, rows in enumerate(lengths) for row in range(rows)
        }
        assert order.epochs(source) == pytest.approx(len(mine) / own.rows)
        first += len(lengths)


@given(mixed_orders(), st.data())
def test_any_window_of_steps_has_the_proportions(order: MixedOrder, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, order.steps - 1))
    stop = data.draw(st.integers(start + 1, order.steps))
    for shard in range(order.shards):
        got = Counter(
            source_of(order, one.unit)
            for step in range(start, stop)
            for one in order.row_ranges(shard, step)
            for _ in range(one.rows)
        )
        for source, count in enumerate(order.counts):
            share = count / sum(order.counts)
            rows = (stop - start) * order.per_shard
            assert abs(got[source] - share * rows) <= 1 + share * len(order.counts)
            assert got[source] == order.used_before(shard, stop, source) - order.used_before(shard, start, source)


def test_after_whole_patterns_the_proportions_are_exact() -> None:
    order = MixedOrder([[50], [50]], [3, 1], shards=3, batch_size=12, seed=0, steps=9)
    assert [[order.used_before(shard, step, 1) for step in range(4)] for shard in range(3)] == [[0, 1, 2, 3]] * 3
    # Shards begin at different places of the pattern, so that batches are balanced, too.
    order = MixedOrder([[50], [50]], [3, 1], shards=4, batch_size=4, seed=0, steps=9)
    for step in range(9):
        assert [source_of(order, one.unit) for shard in range(4) for one in order.row_ranges(shard, step)].count(1) == 1


@given(mixed_orders())
def test_the_rows_of_a_step_are_grouped_by_source(order: MixedOrder) -> None:
    for step in range(order.steps):
        for shard in range(order.shards):
            sources = [source_of(order, one.unit) for one in order.row_ranges(shard, step)]
            assert sources == sorted(sources)


@given(mixed_orders(), st.data())
def test_any_cut_of_a_shards_sequence_is_consistent(order: MixedOrder, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, order.shards - 1))
    whole = [row for step in range(order.steps) for row in rows_of(order.row_ranges(shard, step))]
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert rows_of(order.row_ranges_between(shard, start, stop)) == whole[start:stop]


@given(mixed_orders(), st.data())
def test_the_step_of_a_row_is_the_first_that_needs_it(order: MixedOrder, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, order.shards - 1))
    for source in range(len(order.source_orders)):
        for step in range(order.steps):
            begin, end = (order.used_before(shard, one, source) for one in (step, step + 1))
            assert [order.step_of(shard, at, source) for at in range(begin, end)] == [step] * (end - begin)


@given(mixed_orders(), st.data())
def test_reads_cover_exactly_the_rows_of_each_source_in_order(order: MixedOrder, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, order.steps - 1))
    shards = data.draw(st.sets(st.integers(0, order.shards - 1), min_size=1))
    wanted = list(reads(order, shards, first))
    assert [read.number for read in wanted] == list(range(len(wanted)))
    by_need = [(read.step, read.shard, read.source) for read in wanted]
    assert by_need == sorted(by_need)
    for shard in shards:
        ranges = [one for step in range(first, order.steps) for one in order.row_ranges(shard, step)]
        for source in range(len(order.source_orders)):
            mine = [read for read in wanted if (read.shard, read.source) == (shard, source)]
            assert [row for read in mine for row in rows_of((read.row_range,))] == [
                row for one in ranges if source_of(order, one.unit) == source for row in rows_of((one,))
            ]
            for read in mine:
                in_step = rows_of(order.row_ranges(shard, read.step))
                assert (read.row_range.epoch, read.row_range.unit, read.row_range.start) in in_step


def test_reads_stay_long() -> None:
    order = MixedOrder([[1000], [1000]], [1, 1], shards=2, batch_size=8, seed=0, steps=250)
    assert [read.row_range.rows for read in reads(order, [0], 0)] == [500, 500]


def test_each_source_is_shuffled_by_a_seed_of_its_own() -> None:
    order = MixedOrder([[1] * 30, [1] * 30], [1, 1], shards=1, batch_size=2, seed=7, steps=30)
    units = [[one.unit - 30 * source for one in order.source_ranges(source, 0, 0, 30)] for source in range(2)]
    assert units[0] != units[1]
    for source in range(2):
        alone = SampleOrder([1] * 30, shards=1, batch_size=1, seed=mix(7, 4, source), steps=30)
        assert units[source] == alone.unit_order(0).tolist()
    permuted = MixedOrder([[20], [20]], [1, 1], shards=1, batch_size=2, seed=7, steps=30)
    own = permuted.permutation(3, 1)
    assert own is not None
    wanted = SampleOrder([20], shards=1, batch_size=1, seed=mix(7, 4, 1), steps=1).permutation(3, 0)
    assert own.tolist() == (wanted.tolist() if wanted is not None else None)


def test_fewer_rows_than_shards_are_used_once_an_epoch_too() -> None:
    order = MixedOrder([[2], [9]], [1, 1], shards=5, batch_size=5, seed=0, steps=40)
    used = Counter(row for shard in range(5) for row in rows_of(order.row_ranges_between(shard, 0, 40)))
    assert set(used.values()) == {1}


def test_a_mixed_order_is_pickled_without_its_tables() -> None:
    order = MixedOrder([[50], [70]], [math.pi, 1], shards=2, batch_size=8, seed=0, steps=100)
    before = [order.row_ranges(1, step) for step in range(100)]
    assert len(pickle.dumps(order)) < 2000
    again = pickle.loads(pickle.dumps(order))
    assert [again.row_ranges(1, step) for step in range(100)] == before


def test_first_touches_ends_when_all_sources_were_touched_in_vain() -> None:
    # The first source has many epochs within one of the second.
    order = MixedOrder([[4], [400] * 5], [1, 1], shards=2, batch_size=4, seed=0, shuffle="none", steps=10**9)
    assert {read.row_range.unit for read in first_touches(reads(order, [1], 0), set(range(6)), 2)} == {0, 3, 4, 5}
