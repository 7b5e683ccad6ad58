"""Read a dataset by index: `data.dataset`. Its units are blocks of as many positions; a position stands for one item.

If the job shuffles, positions are scattered over the dataset: position p is the item `order(mix(length), length)[p]`,
the same in all epochs and for all readers. So a block holds items from all over the dataset, as the batches of torch's
DataLoader do, also if the dataset is sorted, and only the items that a step needs are read.

Items must be the same whenever they are read: 64 of them, the marks, are compared with what they were at first whenever
they come by.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from raytrain_plus.data.ledger.ledger import ROW_ID, row_ids
from raytrain_plus.data.order.length_groups import BATCHES, LengthGroups, length_groups, lengths_in
from raytrain_plus.data.order.sample_order import mix, order
from raytrain_plus.data.sources.item_columns import FORM, UnfitItem, digest_of, schema_of, table_of
from raytrain_plus.data.sources.source import Source, cast_rows
from raytrain_plus.data.sources.user_dataset import UserDataset, open_dataset, source_digest
from raytrain_plus.data.values.columns import column_of
from raytrain_plus.errors import DataChanged, DataError

MARKS = 64
"""Items whose content is part of the fingerprint."""
BLOCK = 32
"""Items of a block; more if there would be more than `BLOCKS`."""
BLOCKS = 1 << 16
READ = 1024
"""Items that are read together for their lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSource(Source):
    """See the module docstring. `fingerprint`: over the length, the function's source and the marks."""

    roots: tuple[str, ...]
    """Folders from which the function is imported."""
    length: int
    block: int
    """Positions of a block; the last one has fewer."""
    stored: pa.Schema
    """The columns of the items; `schema` has those that are read."""
    scattered: bool
    """Whether positions are scattered over the dataset."""
    marks: dict[int, str]
    """Item -> SHA-256 of its content."""
    code_sha256: str
    """SHA-256 of the function's source."""
    run: str
    """Names the run: see `open_dataset`."""
    groups: LengthGroups | None = field(default=None, compare=False)
    """Which item is at each position, if items of similar length are together; the fingerprint covers it."""

    @property
    @override
    def by_index(self) -> bool:
        return True

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "path": self.named,
            "dataset": {
                "length": self.length,
                "source_sha256": self.code_sha256,
                "marks": {str(at): of for at, of in self.marks.items()},
                **({} if self.groups is None else {"groups_sha256": self.groups.sha256}),
            },
            "fingerprint": self.fingerprint,
            "rows": self.rows,
            # The blocks as the row groups of a file, which is on no disk.
            "files": [
                {
                    "path": self.named,
                    "bytes": 0,
                    "footer_sha256": self.fingerprint,
                    "row_groups": list(self.unit_rows),
                }
            ],
        }

    @override
    def read_as(self, schema: pa.Schema) -> ItemSource:
        return replace(self, schema=schema)

    @override
    def name(self, unit: int) -> str:
        return f"{self.named}, block {unit}"

    @override
    def file_of(self, unit: int) -> str:
        return self.named

    @override
    def name_rows(self, unit: int, rows: Sequence[int]) -> str:
        items = self._at(unit, np.array(rows)).tolist()
        return f"item{'s' * (len(items) != 1)} {', '.join(map(str, items))} of {self.named}"

    @override
    def read_unit(self, unit: int, prefix: str = "") -> pa.Table:
        return self.read_rows(unit, np.arange(self.unit_rows[unit]), prefix)

    @override
    def read_rows(self, unit: int, rows: npt.NDArray[np.int64], prefix: str = "") -> pa.Table:
        """See `Source.read_rows`; raises `TaskError` if the dataset raises."""
        ids = column_of(row_ids(prefix + self.named, unit, self.unit_rows[unit])[rows])
        table = self._items(self._at(unit, rows).tolist())
        if not self.schema.equals(self.stored):
            table = cast_rows(table, self.schema, self.name(unit))
        return table.append_column(ROW_ID, ids)

    def _at(self, block: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the items at these places of a block."""
        positions = block * self.block + places
        if self.groups is not None:
            return self.groups.order[positions]
        return _scattered(self.length)[positions] if self.scattered else positions

    def grouped(self, groups: LengthGroups) -> ItemSource:
        """Return the source of the same items, in these groups."""
        row_bytes = sum(self.unit_bytes) / self.rows
        unit_rows = _blocks(self.length, groups.block)
        return replace(
            self,
            unit_rows=unit_rows,
            unit_bytes=tuple(round(row_bytes * rows) for rows in unit_rows),
            block=groups.block,
            groups=groups,
            fingerprint=hashlib.sha256(f"{self.fingerprint}\0{groups.sha256}".encode()).hexdigest(),
        )

    def by_length(self, column: str, batch_size: int, microbatch: int) -> ItemSource:
        """Return the source of the same items, in groups of similar length, for which all of them are read once.

        Raises `DataError` if this column says no length, and `TaskError` if the dataset raises.
        """
        if column not in self.stored.names:
            named = ", ".join(self.stored.names)
            raise DataError(f"it has no column '{column}'", f"dataset {self.named}", expected=f"one of {named}")
        parts = []
        for start in range(0, self.length, READ):
            found = lengths_in(self._items(range(start, min(start + READ, self.length))).column(column))
            if found is None:
                kind = self.stored.field(column).type
                raise DataError(
                    f"the column '{column}' is {kind}, which says no length",
                    f"dataset {self.named}",
                    expected="lists, text or whole numbers",
                )
            parts.append(found)
        # So that there are not too many blocks.
        microbatch = max(microbatch, -(-self.length // (BLOCKS * BATCHES)))
        return self.grouped(
            length_groups(column, np.concatenate(parts), _scattered(self.length), batch_size, microbatch)
        )

    def _items(self, indices: Sequence[int]) -> pa.Table:
        dataset = open_dataset(self.named, self.roots, self.run)
        items = dataset.items(indices)
        try:
            table = table_of(items, self.stored)
        except UnfitItem as unfit:
            raise _unfit(self.named, indices[unfit.number], unfit) from None
        for index, item in zip(indices, items, strict=True):
            if index in self.marks and digest_of(item) != self.marks[index]:
                raise _changed(self.named, index)
        return table


def item_source(spec: str, roots: Sequence[str | Path], run: str, *, scattered: bool) -> ItemSource:
    """Look at an indexed dataset: its length, its marks and their columns. `run`: see `open_dataset`.

    Raises `DataError` if it has no items, they do not fit together or change between two reads, and `TaskError` if its
    code raises.
    """
    named = tuple(map(str, roots))
    dataset = open_dataset(spec, named, run)
    length = _length(dataset)
    chosen = sorted(order(mix(length, MARKS), length)[:MARKS].tolist())
    items = dataset.items(chosen)
    try:
        schema = schema_of(items, _declared(dataset))
        table = table_of(items, schema)
    except UnfitItem as unfit:
        raise _unfit(spec, chosen[unfit.number], unfit) from None
    marks = dict(zip(chosen, map(digest_of, items), strict=True))
    for index, item in zip(chosen, dataset.items(chosen), strict=True):
        if digest_of(item) != marks[index]:
            raise _changed(spec, index)
    block = BLOCK
    while length > block * BLOCKS:
        block *= 2
    unit_rows = _blocks(length, block)
    code = source_digest(spec, named)
    digest = hashlib.sha256(f"{length}\0{block}\0{code}\0{schema}\0".encode())
    for index, content in sorted(marks.items()):
        digest.update(f"{index}\0{content}\0".encode())
    return ItemSource(
        named=spec,
        unit_rows=unit_rows,
        unit_bytes=tuple(round(table.nbytes / len(items) * count) for count in unit_rows),
        schema=schema,
        fingerprint=digest.hexdigest(),
        roots=named,
        length=length,
        block=block,
        stored=schema,
        scattered=scattered,
        marks=marks,
        code_sha256=code,
        run=run,
    )


def _blocks(length: int, block: int) -> tuple[int, ...]:
    """Return the rows of each block."""
    whole, left = divmod(length, block)
    return (block,) * whole + (left,) * (left > 0)


def _declared(dataset: UserDataset) -> pa.Schema | None:
    """Return the columns that a `datasets.Dataset` declares; None for others."""
    found = getattr(getattr(dataset.value, "features", None), "arrow_schema", None)
    return found if isinstance(found, pa.Schema) else None


def _length(dataset: UserDataset) -> int:
    where = f"dataset {dataset.spec}"
    try:
        length = len(dataset.value)
    except Exception as error:
        raise dataset.failed(error, "len()") from None
    if not length:
        raise DataError("the dataset has no items", where, expected="rows to train on")
    return length


@functools.lru_cache(4)
def _scattered(length: int) -> npt.NDArray[np.int64]:
    found = order(mix(length), length)
    found.flags.writeable = False
    return found


def _changed(spec: str, index: int) -> DataChanged:
    return DataChanged(
        f"item {index} is not the same each time it is read",
        where=f"dataset {spec}",
        remedy="return the same item for an index, always: draw random numbers in data.transform, whose generator "
        "gives the same ones to every reader; if the data itself has changed, start over with --fresh",
    )


def _unfit(spec: str, index: int, unfit: UnfitItem) -> DataError:
    return DataError(f"item {index}: {unfit}", where=f"dataset {spec}", remedy=FORM)


def changes_of(now: Mapping[str, Any], then: Any) -> list[str]:
    """Describe how the `dataset` in two descriptions of `ItemSource` differs; `then` is read from a file."""
    then = then if isinstance(then, Mapping) else {}
    found, marks = [], then.get("marks")
    if now["length"] != then.get("length"):
        found.append(f"it has {now['length']:,} items, not {then.get('length')}")
    elif changed := [at for at in now["marks"] if not isinstance(marks, Mapping) or now["marks"][at] != marks.get(at)]:
        found.append(f"{len(changed)} of {len(now['marks'])} items differ, such as item {changed[0]}")
    if now.get("groups_sha256") != then.get("groups_sha256"):
        found.append("its items are grouped by other lengths")
    if now["source_sha256"] != then.get("source_sha256"):
        found.append("the source of its function differs")
    return found
