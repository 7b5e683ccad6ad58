"""What draws from the generators of a process is noticed, and gets the numbers of its key."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch

from raytrain_plus.data.order.mixed_order import MixedOrder
from raytrain_plus.data.order.sample_order import SampleOrder
from raytrain_plus.data.reading.stream import _read_one
from raytrain_plus.data.reading.transform_block import RowReader, with_draws
from raytrain_plus.data.sources.mixed_source import mixed
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.errors import TaskError
from raytrain_plus.generators import draws, seeded
from tests.integration.tasks import write_data

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("which", DRAWS)
def test_draws_are_noticed_and_seeded(which: str) -> None:
    draw = DRAWS[which]
    assert draws(draw)
    assert not draws(lambda: np.random.default_rng(0).random())
    assert draws(lambda: (draw(), 1 / 0))
    before = random.getstate(), torch.get_rng_state()
    found = []
    for key in (7, 2**63 + 5, 7):
        with seeded(key):
            found.append([draw(), draw()])
    assert found[0] == found[2] != found[1]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def rows_of(path: Path, transform: Any, **changes: Any) -> RowReader:
    seen = parquet_source(path)
    order = SampleOrder(seen.unit_rows, shards=2, batch_size=8, seed=3, shuffle="rows", steps=9)
    return RowReader(source=seen, sample_order=order, seed=3, transform=transform, block_rows=8, **changes)


def noisy(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    noise = pa.array(np.random.rand(table.num_rows) + torch.rand(table.num_rows).numpy() + random.random())
    return table.append_column("noise", noise)


def own(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    return table.append_column("noise", pa.array(rng.random(table.num_rows)))


def test_a_transform_that_draws_from_them_gets_the_numbers_of_its_block(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    assert not with_draws(rows_of(tmp_path / "data", own)).draws
    rows = with_draws(rows_of(tmp_path / "data", noisy))
    assert rows.draws
    ranges = rows.sample_order.row_ranges_between(0, 0, 12)
    first = [rows.read(one) for one in ranges]
    random.random(), torch.rand(3)
    assert [rows.read(one) for one in reversed(ranges)] == first[::-1]
    other = rows_of(tmp_path / "data", noisy)
    assert [other.read(one) for one in ranges] != first


def test_a_few_rows_of_each_source_are_judged(tmp_path: Path) -> None:
    for name in "ab":
        write_data(tmp_path / name)
    seen = mixed([parquet_source(tmp_path / name) for name in "ab"])
    units = [source.unit_rows for source in seen.parts]
    # The rows of a step come source by source.
    order = MixedOrder(units, [1, 1], shards=2, batch_size=512, seed=3, steps=9)
    judged: list[int] = []

    def of_the_second(table: pa.Table, rng: np.random.Generator) -> pa.Table:
        judged.append(table.num_rows)
        return noisy(table, rng) if len(judged) > 1 else table

    rows = RowReader(source=seen, sample_order=order, seed=3, transform=of_the_second, block_rows=64)
    assert with_draws(rows).draws
    assert judged == [8, 8]


def test_an_error_elsewhere_says_where_the_transform_raised_it(tmp_path: Path) -> None:
    write_data(tmp_path / "data")

    def bad(table: pa.Table, rng: np.random.Generator) -> pa.Table:
        raise KeyError("no such word")

    rows = rows_of(tmp_path / "data", bad, draws=True)
    [one, *_] = rows.sample_order.row_ranges_between(0, 0, 4)
    with pytest.raises(TaskError, match=r"data\.transform raised KeyError: 'no such word'") as caught:
        _read_one(cloudpickle.dumps(rows), (), one)
    assert "in bad" in caught.value.user_traceback
    assert ".parquet" in caught.value.where


def test_rows_that_are_read_elsewhere_are_not_read_here(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    there = rows_of(tmp_path / "data", noisy, draws=True)
    asked = []

    def elsewhere(row_range: Any) -> pa.Table:
        asked.append(row_range)
        return there.read(row_range)

    here = rows_of(tmp_path / "data", noisy, draws=True, elsewhere=elsewhere)
    [one, *_] = here.sample_order.row_ranges_between(0, 0, 4)
    assert here.read(one) == there.read(one)
    assert asked == [one]
