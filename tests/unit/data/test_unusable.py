"""Rows that cannot be used are left out, the same whoever reads, and never for another reason."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raytrain_plus.data.ledger.ledger import ROW_ID
from raytrain_plus.data.order.reads import reads
from raytrain_plus.data.order.sample_order import SampleOrder
from raytrain_plus.data.reading.first_rows import first_rows
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.data.reading.reader import Batches, held_out
from raytrain_plus.data.reading.stream import _numbered
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.data.reading.unusable import FAULT, faults_of, is_bare, is_of_rows, joined, judge, usable
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.data.values.row_fault import RowFault
from raytrain_plus.errors import DataError, TaskError, TrainingError

BAD = {3, 4, 11}


def refuse(table: pa.Table) -> pa.Table:
    """Refuse the first bad row, as a function of rows does."""
    for row, value in enumerate(table.column("x").to_pylist()):
        if value in BAD:
            raise RowFault(row, f"{value} is bad", "remove it")
    return table.append_column("twice", pa.array([[2 * value] for value in table.column("x").to_pylist()]))


def noisy(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    """Raise for a bad row, as a user's function does: without its place."""
    if bad := BAD & set(table.column("x").to_pylist()):
        raise ValueError(f"no {min(bad)}\nfor a reason")
    return table.append_column("noise", pa.array(rng.random(table.num_rows)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"x": pa.array(range(16), pa.int64())}), tmp_path / "a.parquet", row_group_size=8)
    return tmp_path


def rows_of(folder: Path, *, shuffle: str = "none", **settings: object) -> RowReader:
    seen = parquet_source(folder)
    order = SampleOrder(seen.unit_rows, shards=2, batch_size=8, seed=5, epochs=2, shuffle=shuffle)  # type: ignore[arg-type]
    given = {"transform": None, "block_rows": 4, "skip": True, **settings}
    return RowReader(source=seen, sample_order=order, seed=5, **given)  # type: ignore[arg-type]


def read(rows: RowReader, step: int, shard: int) -> pa.Table:
    return joined([rows.read(part) for part in rows.sample_order.row_ranges(shard, step)])


def taken(rows: RowReader, microbatches: int = 2) -> dict[tuple[int, int], list[Microbatch]]:
    def values(table: pa.Table) -> list[dict[str, object]]:
        assert table.num_rows
        return table.to_pylist()  # type: ignore[no-any-return]

    feed = Batches(
        rows,
        shards=(0, 1),
        first_step=0,
        microbatches=microbatches,
        collate=values,
        cache=UnitCache(rows, 0),
        make_stream=None,
    )
    with feed:
        return {(step, shard): made for step in range(4) for shard, made in feed.get(step, 10).shards.items()}


@pytest.mark.parametrize("how", [{"before": (refuse,)}, {"after": (refuse,)}, {"transform": noisy}])
@pytest.mark.parametrize("shuffle", ["none", "rows"])
def test_bad_rows_are_left_out_and_all_others_stay_in_place(folder: Path, how: dict[str, object], shuffle: str) -> None:
    rows = rows_of(folder, shuffle=shuffle, **how)
    used, skipped = [], []
    for (step, shard), made in taken(rows).items():
        table = read(rows, step, shard)
        assert [one.start for one in made] == [4 * step, 4 * step + 2]
        places = [place for one in made for place in one.skipped]
        assert sorted(places) == [4 * step + place for place in faults_of(table)]
        good = usable(table)
        assert sum(one.ids for one in made) % 2**64 == int(good.column(ROW_ID).to_numpy().sum())
        used += [row["x"] for one in made if one.rows for row in one.batch]
        skipped += [why for one in made for why in one.skipped.values()]
    assert sorted(used) == sorted([value for value in range(16) if value not in BAD] * 2)
    assert len(skipped) == 2 * len(BAD)
    assert {why.partition("\n")[0] for why in skipped} == (
        {f"data.transform raised ValueError: no {value}" for value in BAD}
        if "transform" in how
        else {f"{value} is bad" for value in BAD}
    )


def test_without_skip_the_row_is_named(folder: Path) -> None:
    for how in ({"before": (refuse,)}, {"after": (refuse,)}, {"after": (refuse,), "transform": lambda rows, _: rows}):
        with pytest.raises(DataError, match=r"row 3 of .*a.parquet, row group 0: 3 is bad"):
            read(rows_of(folder, skip=False, **how), 0, 0)


def test_the_transform_gets_the_block_without_bad_rows_and_a_fresh_generator(folder: Path) -> None:
    rows = rows_of(folder, transform=noisy)
    made = read(rows, 0, 0).to_pylist()
    clean = rows_of(folder, transform=lambda table, rng: table.append_column("noise", pa.array(rng.random(3))))
    [part] = clean.sample_order.row_ranges(0, 0)
    whole = clean._transformed(pa.table({"x": [0, 1, 2]}), part, 0)
    assert [row["noise"] for row in made[:3]] == whole.column("noise").to_pylist()
    assert made[3][FAULT] == "data.transform raised ValueError: no 3"


def test_a_row_is_read_again_before_it_is_left_out() -> None:
    seen = []

    def flaky(table: pa.Table) -> pa.Table:
        seen.append(table.column("x").to_pylist())
        if seen[-1] != [7] and 7 in seen[-1]:
            raise RowFault(seen[-1].index(7), "not now")
        return table

    found = judge((flaky,), pa.table({"x": [6, 7, 8]}), lambda place: pa.table({"x": [(6, 7, 8)[place]]}))
    assert (found.rows.column("x").to_pylist(), found.faults, found.places.tolist()) == ([6, 7, 8], {}, [0, 1, 2])
    assert seen == [[6, 7, 8], [7], [8], [6]]


@pytest.mark.parametrize(
    "error", [OSError(5, "input/output error"), MemoryError(), ImportError("no cv2"), TaskError("x")]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_may_not_be_the_rows_fault_ends_the_run(folder: Path, error: Exception, wrapped: bool) -> None:
    def broken(table: pa.Table, rng: object = None) -> pa.Table:
        if not wrapped:
            raise error
        raise RowFault(0, "cannot be read") from error

    with pytest.raises((type(error), DataError)):
        read(rows_of(folder, transform=broken), 0, 0)
    if wrapped:
        with pytest.raises(DataError, match="cannot be read"):
            read(rows_of(folder, before=(broken,)), 0, 0)


def test_only_pillows_own_os_errors_are_of_rows() -> None:
    def unnumbered() -> None:
        raise OSError("the connection was closed")

    def of(act: Callable[[], object]) -> Exception:
        with pytest.raises(OSError) as caught:
            act()
        return caught.value

    picture = io.BytesIO()
    Image.new("RGB", (40, 40)).save(picture, "PNG")
    assert is_of_rows(of(lambda: Image.open(io.BytesIO(b"no image"))))
    assert is_of_rows(of(lambda: Image.open(io.BytesIO(picture.getvalue()[:60])).load()))
    assert not is_of_rows(of(lambda: Image.open("/nowhere/a.png")))
    assert not is_of_rows(of(unnumbered))


def test_a_transform_that_fails_for_no_row_alone_ends_the_run(folder: Path) -> None:
    calls = []

    def needs_few(table: pa.Table, rng: np.random.Generator) -> pa.Table:
        calls.append(table.num_rows)
        if table.num_rows > 1:
            raise ValueError("too many")
        return table

    with pytest.raises(ValueError, match="too many"):
        read(rows_of(folder, transform=needs_few), 0, 0)
    assert calls == [4, 1, 1, 1, 1, 4, 1, 1, 1, 1]


def test_a_transform_that_drops_rows_ends_the_run(folder: Path) -> None:
    with pytest.raises(TrainingError, match="must keep the number of rows"):
        read(rows_of(folder, transform=lambda table, rng: table.slice(1)), 0, 0)


def test_blocks_without_a_usable_row(folder: Path) -> None:
    def only_late(table: pa.Table, rng: np.random.Generator) -> pa.Table:
        if min(table.column("x").to_pylist()) < 4:
            raise ValueError("early")
        return table.append_column("noise", pa.array(rng.random(table.num_rows)))

    rows = rows_of(folder, transform=only_late)
    assert is_bare(read(rows, 0, 0))
    both = joined([read(rows, 0, 0), read(rows, 1, 0)])
    assert both.num_rows == 8
    assert usable(both).column("x").to_pylist() == [4, 5, 6, 7]
    [first, second] = taken(rows)[0, 0]
    assert (first.rows, second.rows, first.batch, len(first.skipped), second.start) == (0, 0, None, 2, 2)
    # A stream leaves such a read to the reader.
    group = tuple(reads(rows.sample_order, (0,), 0))[:1]
    assert not [read for read in _numbered(rows, group, False) if is_bare(read)]
    assert first_rows(rows, 3).column("x").to_pylist() == [4, 5, 6]


def test_a_function_that_refuses_all_rows_is_not_tried_for_ever(folder: Path) -> None:
    def mistake(table: pa.Table, rng: np.random.Generator) -> pa.Table:
        return table.select(["y"])

    with pytest.raises(DataError, match=r"too few to try the task: data.transform raised KeyError(.|\n)*fix: correct"):
        first_rows(rows_of(folder, transform=mistake), 4)


def test_held_out_rows_are_left_out_too(folder: Path) -> None:
    seen = parquet_source(folder)
    order = SampleOrder(seen.unit_rows, shards=2, batch_size=8, seed=0, shuffle="none", epochs=1)
    rows = RowReader(source=seen, sample_order=order, seed=5, transform=None, block_rows=4, before=(refuse,), skip=True)
    made = list(held_out(rows, 0, 4, lambda table: table.column("x").to_pylist()))
    assert [one.batch for one in made] == [[0, 1, 2], [5, 6, 7]]
    assert [len(one.skipped) for one in made] == [1, 1]


def test_the_column_of_faults_is_there_whether_rows_fail_or_not(folder: Path) -> None:
    rows = rows_of(folder, before=(refuse,))
    assert read(rows, 0, 1).column(FAULT).null_count == 3
    assert read(rows, 1, 1).column(FAULT).null_count == 4
    assert FAULT not in read(rows_of(folder, skip=False), 0, 0).column_names


def test_images_beside_skipped_ones_stay_what_they_are() -> None:
    """Arrow's `take` gave the images of other rows, in a slice: the loss differed between one worker and two."""
    values = pa.array(range(20 * 12), pa.int64())
    for length in (2, 2, 3):
        values = pa.FixedSizeListArray.from_arrays(values, length)
    rows = pa.table({"x": list(range(20)), "image": values})
    ids = pa.chunked_array([pa.array(range(20), pa.uint64())])
    found = judge((refuse,), rows, lambda place: rows.slice(place, 1)).spread(ids)
    for begin in range(20):
        left = usable(found.slice(begin, 9))
        images = np.array(left.column("image").to_pylist()).reshape(left.num_rows, 12)
        assert left.column("x").to_pylist() == [x for x in range(begin, min(20, begin + 9)) if x not in BAD]
        assert images[:, 0].tolist() == [12 * x for x in left.column("x").to_pylist()]
