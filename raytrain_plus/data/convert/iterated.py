"""Read a dataset that can only be iterated, once per node, into Parquet in the user's cache: the same rows in order.

The name of its folder contains a digest of the function's source and of the first items: if these change, it is read
again. A reading that was killed begins anew.
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
from raytrain_plus.data.convert.parts import Parts, Progress, is_complete
from raytrain_plus.data.convert.records import Block
from raytrain_plus.data.item_columns import UnfitItem, digest_of, schema_of, table_of
from raytrain_plus.data.user_dataset import UserDataset, call_function, source_digest
from raytrain_plus.errors import DataError

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
    target = cache / _folder_name(dataset)
    if dataset.kind == "ray" and in_worker and not is_complete(target):
        raise DataError(
            "a ray.data.Dataset is read on the driver's machine alone, and this node has no copy of its rows",
            where=f"data.dataset: {dataset.spec} on {os.uname().nodename}",
            remedy="write it with write_parquet to a folder that all machines see, and name that in data.path",
        )
    made_once(target, dataset.spec, lambda partial: _write(dataset, partial, told))
    return target


def _folder_name(dataset: UserDataset) -> str:
    digest = hashlib.sha256(f"{dataset.spec}\0{source_digest(dataset.spec, dataset.roots)}\0{pa.__version__}".encode())
    if dataset.kind == "ray":
        digest.update("\0".join(_named_files(dataset.value)).encode())
    else:
        for item in islice(_items(dataset), FIRST):
            digest.update(digest_of(item).encode())
    plain = "".join(letter if letter.isalnum() else "_" for letter in dataset.spec)[:40]
    return f"{plain}-{digest.hexdigest()[:16]}"


def _named_files(value: Any) -> Iterator[str]:
    """Yield the files that a `ray.data.Dataset` reads, with sizes and times of those on this machine."""
    for file in sorted(value.input_files()):
        yield file
        with suppress(OSError):
            seen = os.stat(file)
            yield f"{seen.st_size} {seen.st_mtime_ns}"


def _write(dataset: UserDataset, partial: Path, told: Told) -> None:
    for file in partial.iterdir():
        file.unlink()
    tables = _ray_tables(dataset) if dataset.kind == "ray" else _tables(dataset)
    parts, read = None, 0
    for table in tables:
        if parts is None:
            parts = Parts(partial, Progress.of(table.schema))
        elif not table.schema.equals(parts.progress.columns):
            table = table.cast(parts.progress.columns)
        parts.add(Block(table, 0, 0), 0)
        read += table.num_rows
        told(read)
    if parts is not None:
        parts.end()


def _tables(dataset: UserDataset) -> Iterator[pa.Table]:
    """Yield the items as tables. Raises `DataError` for an item that does not fit those before it."""
    items, at = _items(dataset), 0
    schema: pa.Schema | None = None
    while batch := list(islice(items, SAMPLE)):
        try:
            schema = schema or schema_of(batch)
            yield table_of(batch, schema)
        except UnfitItem as unfit:
            raise DataError(f"item {at + unfit.number}: {unfit}", where=f"data.dataset: {dataset.spec}") from None
        at += len(batch)


def _items(dataset: UserDataset) -> Iterator[Any]:
    """Yield the items of a dataset from its begin. Raises `TaskError` if its code raises."""
    # Called again, because what it returns may be iterable only once.
    items = iter(call_function(dataset.spec, dataset.roots))
    for number in range(2**63):
        try:
            item = next(items)
        except StopIteration:
            return
        except Exception as error:
            raise dataset.failed(error, f"item {number}") from None
        yield item


def _ray_tables(dataset: UserDataset) -> Iterator[pa.Table]:
    """Yield the blocks of a `ray.data.Dataset`, in order."""
    value = dataset.value
    value.context.execution_options.preserve_order = True
    value.context.enable_progress_bars = False
    try:
        for table in value.iter_batches(batch_size=SAMPLE, batch_format="pyarrow"):
            yield table.replace_schema_metadata(None)
    except Exception as error:
        raise dataset.failed(error, "iter_batches()") from None
