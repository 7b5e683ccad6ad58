"""What draws from the generators of a process is noticed, and gets the numbers of its key."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from raytrain_plus.data.generators import draws, seeded
from raytrain_plus.data.sample_order import SampleOrder
from raytrain_plus.data.source import index
from raytrain_plus.data.transform_block import Rows, with_draws
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
    with pytest.raises(ZeroDivisionError):
        (lambda: 1 / 0)()
    assert draws(lambda: (draw(), 1 / 0))
    before = random.getstate(), torch.get_rng_state()
    found = []
    for key in (7, 2**63 + 5, 7):
        with seeded(key):
            found.append([draw(), draw()])
    assert found[0] == found[2] != found[1]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def rows_of(path: Path, transform: Any, **changes: Any) -> Rows:
    seen = index(path)
    order = SampleOrder(seen.unit_rows, shards=2, batch_size=8, seed=3, shuffle="rows", steps=9)
    return Rows(index=seen, sample_order=order, seed=3, transform=transform, block_rows=8, **changes)


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
