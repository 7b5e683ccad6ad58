"""Ready functions that make a batch of rows, by name: the setting `data.collate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from raytrain_plus.data.values.tokens import POSITIONS
from raytrain_plus.job.task_loader import load_function
from raytrain_plus.task import Task, column_array, column_tensor

MASK = "attention_mask"
IGNORED = {"labels": -100}
"""The padding value of these columns, which losses of PyTorch and Transformers ignore; others are padded with 0."""
ADDED = (POSITIONS, "cu_seq_lens")
"""What `pack` adds to the columns."""


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
        if _is_text(kind):
            batch[name] = column_array(table, name).to_pylist()
        elif _is_list(kind):
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


def pack(table: pa.Table) -> dict[str, Any]:
    """Return a batch in which the rows of a microbatch are one sequence, without padding.

    Each row is a document. Lists become tensors of shape (1, tokens): `input_ids` and `labels` int64, the first label
    of each document -100, because no token before it predicts it. `position_ids` (1, tokens), int64, begins at 0 in
    each document. `cu_seq_lens` (rows + 1,), int32, says where documents begin and end. Text and other columns are as
    with `pad`. `attention_mask` is left out: attention must not cross documents.

    Raises `TypeError` for nulls, for what is not numeric, for lists whose lengths differ from those of `input_ids`, or
    else of the first column of lists, for a mask with zeros, for rows without any tokens, and for columns with the
    names that this adds.
    """
    main = _main_lists(table)
    flat, lengths = _flat(table, main)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if not starts[-1]:
        raise TypeError(f"column '{main}' is empty in all {table.num_rows} rows of a microbatch: drop such rows")
    batch: dict[str, Any] = {}
    for name in table.column_names:
        kind = table.column(name).type
        if name in ADDED:
            raise TypeError(f"column '{name}' has the name of a tensor that data.collate: pack makes: rename it")
        if not _is_packed(kind, table.column(main).type):
            batch[name] = column_array(table, name).to_pylist() if _is_text(kind) else column_tensor(table, name)
            continue
        values, own = (flat, lengths) if name == main else _flat(table, name)
        if not np.array_equal(own, lengths):
            raise TypeError(
                f"column '{name}' holds lists of other lengths than '{main}', and data.collate: pack joins token by "
                "token: drop the column in data.transform, or give it lists of equal lengths"
            )
        if name == MASK:
            if not bool(values.bool().all()):
                raise TypeError(f"column '{MASK}' masks tokens, which a packed batch cannot: drop them in data.prepare")
            continue
        if name in ("input_ids", "labels"):
            values = values.to(torch.int64)
        if name == "labels":
            # An empty row has no label, and the last one would begin past the end.
            values[starts[:-1][lengths > 0]] = IGNORED[name]
        batch[name] = values.unsqueeze(0)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return {
        **batch,
        POSITIONS: torch.from_numpy(positions).unsqueeze(0),
        "cu_seq_lens": torch.from_numpy(starts.astype(np.int32)),
    }


def default_weight(task: Task, batch: Any, rows: int) -> float:
    """Return what a batch counts in a mean unless its task says: its tokens if they are packed, or its rows."""
    return float(batch[POSITIONS].numel() if counts_tokens(task) else rows)


def counts_tokens(task: Task) -> bool:
    """Return whether means are over tokens, and not over rows, because `data.collate` packs."""
    return task.collate is pack


def _main_lists(table: pa.Table) -> str:
    """Return the column whose lists are the documents."""
    lists = [name for name in table.column_names if _is_list(table.column(name).type)]
    if "input_ids" in table.column_names and pa.types.is_fixed_size_list(table.column("input_ids").type):
        lists.append("input_ids")
    if not lists:
        found = ", ".join(f"{name} ({table.column(name).type})" for name in table.column_names)
        raise TypeError(f"data.collate: pack needs a column of lists, such as 'input_ids'; the columns are {found}")
    return "input_ids" if "input_ids" in lists else lists[0]


def _is_packed(kind: pa.DataType, main: pa.DataType) -> bool:
    """Return whether a column of this type holds a value for each token, given the type of the documents."""
    # Lists of one size are a row's features, such as an image, unless each document has that size.
    fixed = pa.types.is_fixed_size_list
    return _is_list(kind) or (fixed(kind) and fixed(main) and kind.list_size == main.list_size)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _flat(table: pa.Table, name: str) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Return the values of all lists of a column, one list after the other, and the lengths of the lists."""
    column = column_array(table, name)
    values = column_tensor(pa.table({name: column.flatten()}), name)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return values, lengths


def _padded(table: pa.Table, name: str) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Return a column of lists as one tensor, and the lengths of the lists."""
    values, lengths = _flat(table, name)
    if values.dtype == torch.uint64:
        raise TypeError(f"column '{name}' holds uint64, which PyTorch cannot pad: write it as int64")
    if values.dtype in (torch.uint16, torch.uint32) or (name in IGNORED and values.dtype in (torch.bool, torch.uint8)):
        values = values.to(torch.int64)
    shape = (len(lengths), int(lengths.max(initial=0)), *values.shape[1:])
    filled = torch.full(shape, IGNORED.get(name, 0), dtype=values.dtype)
    filled[_mask(lengths).bool()] = values
    return filled, lengths


def _mask(lengths: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy((np.arange(int(lengths.max(initial=0))) < lengths[:, None]).astype(np.int64))


READY: Mapping[str, Callable[..., Any]] = {"stack": Task.collate, "pad": pad, "pack": pack}
"""The ready functions, by name."""
