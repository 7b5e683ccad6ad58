"""Ready functions that make a batch of rows, by name: the setting `data.collate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from raytrain_plus.job.task_loader import load_function
from raytrain_plus.task import Task, column_array, column_tensor

MASK = "attention_mask"
IGNORED = {"labels": -100}
"""The padding value of these columns, which losses of PyTorch and Transformers ignore; others are padded with 0."""


def set_collate(task: Task, spec: str | None) -> None:
    """Let a task collate as `data.collate` says; None leaves the task's own.

    Raises `TaskError` if the function cannot be imported; its module must be on the path.
    """
    if spec is not None:
        found = READY[spec] if spec in READY else load_function(spec, ())
        # Whatever the class does when an attribute is set; the default stays recognisable as a method.
        object.__setattr__(task, "collate", MethodType(Task.collate, task) if found is Task.collate else found)


def pad(table: pa.Table) -> dict[str, Any]:
    """Return a batch in which lists are filled up to the longest of their column.

    Lists become tensors of shape (rows, longest), text becomes a list of str, and other columns tensors of shape
    (rows,). `attention_mask`, of the same shape, is 1 where `input_ids`, or else the first column of lists, has a value
    and 0 where it was filled up; columns of other lengths get masks of their own, `<column>_mask`. Raises `TypeError`
    for nulls and for what is not numeric.
    """
    batch: dict[str, Any] = {}
    lengths: dict[str, np.ndarray[Any, Any]] = {}
    for name in table.column_names:
        kind = table.column(name).type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            batch[name] = column_array(table, name).to_pylist()
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            batch[name], lengths[name] = _padded(table, name)
        elif name == "input_ids" and pa.types.is_fixed_size_list(kind):
            batch[name] = column_tensor(table, name)
            lengths[name] = np.full(table.num_rows, kind.list_size)
        else:
            batch[name] = column_tensor(table, name)
    if lengths:
        main = "input_ids" if "input_ids" in lengths else next(iter(lengths))
        for name, own in lengths.items():
            if name == main:
                batch.setdefault(MASK, _mask(own))
            elif not np.array_equal(own, lengths[main]):
                batch.setdefault(f"{name}_mask", _mask(own))
    return batch


def _padded(table: pa.Table, name: str) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Return a column of lists as one tensor, and the lengths of the lists."""
    column = column_array(table, name)
    values = column_tensor(pa.table({name: column.flatten()}), name)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    if values.dtype == torch.uint64:
        raise TypeError(f"column '{name}' holds uint64, of which PyTorch cannot fill up lists: write it as int64")
    if values.dtype in (torch.uint16, torch.uint32) or (name in IGNORED and values.dtype in (torch.bool, torch.uint8)):
        values = values.to(torch.int64)
    shape = (len(lengths), int(lengths.max(initial=0)), *values.shape[1:])
    filled = torch.full(shape, IGNORED.get(name, 0), dtype=values.dtype)
    filled[_mask(lengths).bool()] = values
    return filled, lengths


def _mask(lengths: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy((np.arange(int(lengths.max(initial=0))) < lengths[:, None]).astype(np.int64))


READY: Mapping[str, Callable[..., Any]] = {"stack": Task.collate, "pad": pad}
"""The ready functions, by name."""
