"""Read a dataset that can only be iterated, once per node, into Parquet in the user's cache: the same rows in order.

The name of its folder contains a digest of the function's module, of the user's modules that it imports, and of the
first items: if these change, it is read again. A reading that was killed begins anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from raytrain_plus.data.convert.cache import made_once
from raytrain_plus.data.convert.formats.record_blocks import RecordBlock
from raytrain_plus.data.convert.parts import ConvertedParts, Progress, is_complete
from raytrain_plus.data.sources.item_columns import FORM, UnfitItem, digest_of, schema_of, table_of
from raytrain_plus.data.sources.user_dataset import UserDataset, call_function
from raytrain_plus.errors import DataError, TaskError, first_line
from raytrain_plus.job.task_source import module_digests, whole_digest

FIRST = 64
"""Items that the name of the folder depends on."""
SAMPLE = 1000
"""Items whose types decide the columns."""

Told = Callable[[int], None]
"""Called now and then with the number of items that have been read."""


def read_once(dataset: UserDataset, cache: Path, told: Told, *, in_worker: bool = False) -> Path:
    """Return the folder with the Parquet files of a dataset that is iterated; read it if they are missing.

    Raises `TaskError` if its code raises, and `DataError` if its items cannot be written as one table, or if this is a
    worker whose node has no copy of a `ray.data.Dataset`: its tasks would wait for CPUs that the workers hold.
    """
    first = "" if dataset.kind == "ray" else _digest_of_first(_items(dataset))
    target = cache / _folder_name(dataset, first)
    if dataset.kind == "ray" and in_worker and not is_complete(target):
        raise DataError(
            "a ray.data.Dataset is read on the driver's machine alone, and this node has no copy of its rows",
            where=f"dataset {dataset.spec} on {os.uname().nodename}",
            remedy="write it with write_parquet to a folder that all machines see, and name that in data.path",
        )
    made_once(target, dataset.spec, lambda partial: _write(dataset, first, partial, told))
    return target


def _folder_name(dataset: UserDataset, first: str) -> str:
    code = whole_digest(module_digests([dataset.spec.partition(":")[0]], [Path(root) for root in dataset.roots]))
    digest = hashlib.sha256(f"{dataset.spec}\0{code}\0{pa.__version__}".encode())
    digest.update("\0".join(_named_files(dataset.value) if dataset.kind == "ray" else [first]).encode())
    plain = "".join(letter if letter.isalnum() else "_" for letter in dataset.spec)[:40]
    return f"{plain}-{digest.hexdigest()[:16]}"


def _named_files(value: Any) -> Iterator[str]:
    """Yield the files that a `ray.data.Dataset` reads, with sizes and times of those on this machine."""
    for file in sorted(value.input_files()):
        yield file
        with suppress(OSError):
            seen = os.stat(file)
            yield f"{seen.st_size} {seen.st_mtime_ns}"


def _write(dataset: UserDataset, first: str, partial: Path, told: Told) -> None:
    for file in partial.iterdir():
        file.unlink()
    parts, read = None, 0
    for table in _ray_tables(dataset) if dataset.kind == "ray" else _tables(dataset, first):
        parts = parts or ConvertedParts(partial, Progress.of(table.schema))
        parts.add(RecordBlock(table, 0, 0), 0)
        read += table.num_rows
        told(read)
    if parts is not None:
        parts.end()


def _tables(dataset: UserDataset, first: str) -> Iterator[pa.Table]:
    """Yield the items as tables. Raises `DataError` for an item that does not fit those before it."""
    items, at = _items(dataset), 0
    schema: pa.Schema | None = None
    while batch := list(islice(items, SAMPLE)):
        if not at and _digest_of_first(iter(batch)) != first:
            raise DataError(
                "its first items are not the same each time it is read",
                where=f"dataset {dataset.spec}",
                remedy="return the same items in the same order, always, from a new iterator: the run shuffles them, "
                "and data.transform has a generator of random numbers",
            )
        try:
            schema = schema or schema_of(batch)
            yield table_of(batch, schema)
        except UnfitItem as unfit:
            what = f"item {at + unfit.number}: {unfit}"
            raise DataError(what, where=f"dataset {dataset.spec}", remedy=FORM) from None
        at += len(batch)


def _digest_of_first(items: Iterator[Any]) -> str:
    return hashlib.sha256("".join(map(digest_of, islice(items, FIRST))).encode()).hexdigest()


def _items(dataset: UserDataset) -> Iterator[Any]:
    """Yield the items of a dataset from its begin. Raises `TaskError` if its code raises."""
    number, items = -1, None
    while True:
        try:
            # Called again, because what it returns may be iterable only once.
            items = iter(call_function(dataset.spec, dataset.roots)) if items is None else items
            number += 1
            item = next(items)
        except StopIteration:
            return
        except TaskError:
            raise
        except Exception as error:
            raise dataset.failed(error, f"item {max(0, number)}") from None
        yield item


def _ray_tables(dataset: UserDataset) -> Iterator[pa.Table]:
    """Yield the rows of a `ray.data.Dataset`, in order. Raises `DataError` for rows with other columns."""
    schema: pa.Schema | None = None
    at = 0
    for rows in _ray_batches(dataset):
        try:
            table = _without_tensors(rows)
            schema = table.schema if schema is None else schema
            table = table.select(schema.names).cast(schema)
        except (UnfitItem, pa.ArrowException, KeyError, ValueError) as error:
            raise DataError(
                f"the rows from {at:,} on have other columns than those before: {first_line(error)}",
                where=f"dataset {dataset.spec}",
                expected=", ".join(f"{field.name}: {field.type}" for field in schema or ()),
            ) from None
        at += table.num_rows
        yield table


def _ray_batches(dataset: UserDataset) -> Iterator[pa.Table]:
    """Yield the rows of a `ray.data.Dataset`, in order. Raises `TaskError` if it cannot be executed."""
    value = dataset.value
    value.context.execution_options.preserve_order = True
    value.context.enable_progress_bars = False
    try:
        yield from value.iter_batches(batch_size=SAMPLE, batch_format="pyarrow")
    except Exception as error:
        raise dataset.failed(error, "iter_batches()") from None


def _without_tensors(rows: pa.Table) -> pa.Table:
    """Return rows with lists in place of Ray's tensors, which only a process that has loaded Ray Data can read."""
    rows = rows.replace_schema_metadata(None)
    for at, field in enumerate(rows.schema):
        if isinstance(field.type, pa.BaseExtensionType):
            values = [one for chunk in rows.column(at).chunks for one in chunk.to_numpy(zero_copy_only=False)]
            items = [{field.name: value} for value in values]
            rows = rows.set_column(at, field.name, table_of(items, schema_of(items)).column(0))
    return rows
