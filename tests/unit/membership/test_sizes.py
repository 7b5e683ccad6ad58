"""The table of group sizes: what is formed out of how many workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.membership.sizes import SizeTable, useful_size


@given(available=st.integers(0, 12), minimum=st.integers(1, 6), more=st.integers(0, 8), shards=st.integers(1, 16))
def test_with_one_stage_a_shape_has_the_useful_size(available: int, minimum: int, more: int, shards: int) -> None:
    if minimum > shards:
        return
    shape = SizeTable(minimum, minimum + more, shards, (1,)).shape(available)
    assert (shape.size if shape else 0) == useful_size(available, minimum, minimum + more, shards)


@given(
    available=st.integers(1, 24),
    minimum=st.integers(1, 4),
    maximum=st.integers(4, 24),
    shards=st.integers(1, 16),
    wished=st.sampled_from([(1,), (2, 1), (4, 2, 1), (3, 2), (4,)]),
)
def test_a_shape_fits_and_leaves_the_requested_partition_only_without_a_replica_of_it(
    available: int, minimum: int, maximum: int, shards: int, wished: tuple[int, ...]
) -> None:
    shape = SizeTable(minimum, maximum, shards, wished).shape(available)
    able = [stages for stages in wished if stages <= min(available, maximum)]
    if available < minimum or not able:
        assert shape is None
        return
    assert shape is not None
    assert shape.stages == able[0]
    assert shape.size <= min(available, maximum)
    assert shape.replicas <= shards


@given(
    minimum=st.integers(1, 4),
    maximum=st.integers(4, 24),
    shards=st.integers(1, 16),
    wished=st.sampled_from([(1,), (2, 1), (4, 2, 1), (3, 2), (4,)]),
    more=st.integers(0, 40),
)
def test_more_workers_than_the_table_has_form_its_largest_group(
    minimum: int, maximum: int, shards: int, wished: tuple[int, ...], more: int
) -> None:
    table = SizeTable(minimum, maximum, shards, wished)
    assert table.shape(len(table.shapes) + more) == table.largest
    sizes = [0 if shape is None else shape.size for shape in table.shapes]
    assert sizes == sorted(sizes), "a larger number of workers never forms a smaller group"
    if table.largest is not None:
        assert max(wished[0] * shards, minimum) >= table.largest.size


def test_the_minimum_is_at_least_a_replica_of_the_smallest_partition() -> None:
    table = SizeTable(1, 8, 12, (4, 2))
    assert (table.fewest, min(table.formed), table.useful) == (2, 2, 8)
    assert (SizeTable(3, 8, 12, (4, 2)).fewest, SizeTable(3, 3, 12, (2,)).useful) == (3, 3)


@given(
    minimum=st.integers(1, 9),
    more=st.integers(0, 12),
    shards=st.integers(1, 16),
    wished=st.sampled_from([(1,), (2, 1), (4, 2, 1), (3, 2), (4,)]),
)
def test_no_replica_hosts_more_shards_than_the_table_says(
    minimum: int, more: int, shards: int, wished: tuple[int, ...]
) -> None:
    table = SizeTable(minimum, minimum + more, shards, wished)
    for shape in table.formed.values():
        assert -(-shards // shape.replicas) <= table.most_shards(shape.stages)
