"""Tasks that take any arguments, and functions for data, that fuzzed jobs refer to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from raytrain_plus import Task

ROWS = 64


class Small(Task):
    """Two layers on one column."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def layers(self) -> Mapping[str, Callable[[], nn.Module]]:
        return {"first": lambda: nn.Linear(1, 2), "last": lambda: nn.Linear(2, 1)}

    def collate(self, table: pa.Table) -> torch.Tensor:
        return torch.tensor(table.column("x").to_numpy().astype(np.float32)).reshape(-1, 1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()


def prepare(folder: Path, name: str) -> None:
    """Write a few rows."""
    pq.write_table(pa.table({"x": np.arange(ROWS)}), folder / f"{name or 'data'}.parquet", row_group_size=16)


def same(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    """Return the table unchanged."""
    return table


def explode(**given: Any) -> None:
    """Raise, as a function that is not a task."""
    raise ValueError("as a user's code does")
