"""The same rows as a table, and as datasets of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

TRAINED, HELD_OUT = 900, 90


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 6))
    y = (x[:, 0] + x[:, 1] > 0).astype(int) + (x[:, 2] > 1)
    return [{**{f"x{n}": float(v) for n, v in enumerate(of)}, "y": int(label)} for of, label in zip(x, y, strict=True)]


class Indexed(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, count: int, seed: int) -> None:
        self._rows = rows(count, seed)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


class Iterated(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __init__(self, count: int, seed: int) -> None:
        self._rows = rows(count, seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


def indexed() -> Indexed:
    return Indexed(TRAINED, 0)


def held_out() -> Indexed:
    return Indexed(HELD_OUT, 1)


def iterated() -> Iterated:
    return Iterated(TRAINED, 0)


def hugging_face() -> Any:
    import datasets

    return datasets.Dataset.from_list(rows(TRAINED, 0))


def of_ray() -> Any:
    import ray

    return ray.data.from_items(rows(TRAINED, 0), override_num_blocks=7)
