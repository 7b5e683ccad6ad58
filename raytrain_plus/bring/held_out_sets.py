"""Several held-out datasets as one, in which each row has the number of its set."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import Dataset

from raytrain_plus.errors import InputError
from raytrain_plus.torch_compat import pytree

SET = "raytrain_set"
"""The column with the numbers of sets."""


class NumberedSets(Dataset[dict[str, Any]]):
    """Datasets one after the other; `SET` of an item is the number of its dataset."""

    def __init__(self, sets: Sequence[Any]) -> None:
        """Take datasets whose items are mappings. Raises `InputError` if one has no length or other items."""
        for one in sets:
            if not hasattr(one, "__len__") or not len(one) or not isinstance(one[0], Mapping):
                raise InputError(
                    "a dict of held-out datasets needs datasets with a length, of items that are mappings",
                    where="Trainer(eval_dataset=...)",
                    remedy="give one held-out dataset, and call evaluate with the others after train",
                )
        self._sets = list(sets)
        self._ends = list(accumulate(map(len, sets)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        return {**self._sets[number][index - first], SET: number}


def rows_where(batch: Mapping[str, Any], chosen: torch.Tensor) -> dict[str, Any]:
    """Return the rows of a batch for which `chosen` is true, of every tensor that has as many rows."""

    def of(value: Any) -> Any:
        rows = isinstance(value, torch.Tensor) and value.dim() and len(value) == len(chosen)
        return value[chosen] if rows else value

    found: dict[str, Any] = pytree.tree_map(of, dict(batch))
    return found


def by_set(metrics: Mapping[int, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of each set, `eval_loss` of the set `a` as `eval_a_loss`; NaN for a set that had no rows.

    `metrics`: those of each set that had some, by its number.
    """
    known = dict.fromkeys(name for found in metrics.values() for name in found)
    return {
        f"eval_{name}_{metric.removeprefix('eval_')}": metrics.get(number, {}).get(metric, float("nan"))
        for number, name in enumerate(names)
        for metric in known
    }
