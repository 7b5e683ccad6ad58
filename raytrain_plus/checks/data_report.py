"""Say what a run of a job would read: its rows, columns and row groups, a few values, and what an epoch costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raytrain_plus.data.dataset import both_data
from raytrain_plus.data.of_job import SourceShare, keeps_rows, read_factor_of, sample_order_of, source_shares
from raytrain_plus.data.paths.page_checksum import LOOKED_AT, without_checksums
from raytrain_plus.data.prepare import check_preparable, prepare_data
from raytrain_plus.data.reading.transform_block import without_ids
from raytrain_plus.data.sources.converted_source import ConvertedSource, class_names
from raytrain_plus.data.sources.packing import PackedSource
from raytrain_plus.data.sources.source import within
from raytrain_plus.job.settings import Job
from raytrain_plus.observe.run_progress import plural
from raytrain_plus.storage.size_text import size_text

SAMPLE_BYTES = 64 << 20
"""Decoded bytes of the row groups that are read for samples and times."""
SHOWN = 3
"""Values of each column that are shown."""
LONG = 40
"""Characters of a value that are shown."""
NAMED = 10
"""Classes that are shown, beside the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedColumn:
    """A column of the data."""

    name: str
    type: str
    nulls: int
    """Nulls in the row groups that were looked at."""
    values: tuple[str, ...]
    """Its first values."""
    items: float | None = None
    """Mean length of its lists, such as the tokens of a row; None for other types."""
    longest: int | None = None
    """The longest of them in the row groups that were looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """The data that a run would read."""

    path: str
    converted: str | None
    """The folder of the converted data; None for Parquet."""
    rows: int
    columns: tuple[ReportedColumn, ...]
    row_groups: int
    fewest: int
    """Rows of the shortest row group."""
    most: int
    bytes: int
    """Approximate decoded bytes of all rows."""
    looked_at: int
    """Rows that were read for this report."""
    read_factor: float | None
    """How often a row group is read in an epoch, on average; None for a dataset that is read by index, whose blocks are
    its row groups."""
    kept: bool
    """Whether workers keep the row groups in memory once they are read, so that an epoch reads nothing again."""
    epoch_s: float
    """Expected seconds of one process to read an epoch, without a transform and with nothing in memory."""
    files: int
    without_checksums: tuple[str, ...]
    """Those of the first files without page checksums."""
    mix: tuple[SourceShare, ...] = ()
    """The sources of a mix."""
    packed: tuple[str, ...] = ()
    """How the rows were packed, in words: a line for each source of a mix."""
    classes: tuple[str, ...] = ()
    """The class folders of image files, in the order of their labels."""
    dropped_tokens: int | None = None
    """Tokens that fill no packed row; None if rows are not packed."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return lines of text for a person."""
        groups = f"{self.fewest:,}" if self.fewest == self.most else f"{self.fewest:,} to {self.most:,}"
        said = [f"{self.path}: {self.rows:,} rows, {size_text(self.bytes)} decoded"]
        if self.converted is not None:
            said.append(f"  converted to Parquet in {self.converted}")
        said += [source.line() for source in self.mix]
        said += [f"  {line}" for line in self.packed]
        if self.read_factor is None:
            said.append("  read by index")
        else:
            said.append(f"  {plural(self.row_groups, 'row group')} of {groups} rows in {plural(self.files, 'file')}")
        width, kinds = (max(len(getattr(one, what)) for one in self.columns) for what in ("name", "type"))
        for one in self.columns:
            said.append(f"  {one.name:{width}}  {one.type:{kinds}}  {', '.join(one.values)}{_more(one, self)}")
        if self.classes:
            more = f", ... {len(self.classes) - 1:,} {self.classes[-1]}" if len(self.classes) > NAMED else ""
            named = ", ".join(f"{number} {name}" for number, name in enumerate(self.classes[:NAMED]))
            said.append(f"  labels are the folders: {named}{more}")
        often = "row once" if self.read_factor is None else f"row group {self.read_factor:.2f} times"
        if self.kept:
            said.append("  workers keep the row groups in memory once they are read (data.cache_mb)")
        else:
            said.append(f"  an epoch reads each {often}: {self.epoch_s:,.1f} s for one process")
        if self.without_checksums:
            have = "has" if len(self.without_checksums) == 1 else "have"
            said.append(f"  {plural(len(self.without_checksums), 'file')} {have} no page checksums")
        return said


def _more(column: ReportedColumn, report: DataReport) -> str:
    more = f"; {plural(column.nulls, 'null')} in {plural(report.looked_at, 'row')}" if column.nulls else ""
    if column.items is None:
        return more
    whole = f"{column.items * report.rows:,.0f} in all"
    return f"; {column.items:,.1f} items on average, at most {column.longest:,}, {whole}{more}"


def data_report(job: Job, roots: Sequence[Path]) -> DataReport:
    """Read some row groups of a job's data, which is prepared or converted first, and say what a run would read.

    Raises `DataError` for data that cannot be read, or held-out data with other columns, and `TaskError` if
    `data.prepare` fails.
    """
    search = [Path.cwd(), *roots]
    check_preparable(job, search)
    prepare_data(job, search)
    seen, _ = both_data(job, search)
    order, units, wanted = sample_order_of(job, seen), len(seen.unit_rows), list[pa.Table]()
    start, read = time.perf_counter(), 0
    for unit in range(units):
        wanted.append(without_ids(seen.read_unit(unit)))
        read += seen.unit_bytes[unit]
        if read >= SAMPLE_BYTES:
            break
    seconds, factor = time.perf_counter() - start, read_factor_of(order, seen)
    table = pa.concat_tables(wanted)
    files = seen.places
    packed = [source.packing for source in within(seen, PackedSource)]
    made = [one.source.named for one in seen.parts if isinstance(one, (ConvertedSource, PackedSource))]
    return DataReport(
        path=seen.named,
        converted=made[0] if len(seen.parts) == len(made) == 1 else None,
        rows=seen.rows,
        columns=tuple(_column(table, name) for name in table.column_names),
        row_groups=units,
        fewest=min(seen.unit_rows),
        most=max(seen.unit_rows),
        bytes=sum(seen.unit_bytes),
        looked_at=table.num_rows,
        read_factor=factor,
        kept=factor is not None and keeps_rows(job, seen),
        epoch_s=seconds / read * sum(seen.unit_bytes) * (factor or 1),
        files=len(files),
        without_checksums=tuple(map(str, without_checksums(files[:LOOKED_AT]))),
        mix=source_shares(job, seen),
        classes=tuple(class_names(seen)),
        packed=tuple(
            (f"source {number}: " if len(seen.parts) > 1 else "") + source.line()
            for number, source in enumerate(packed)
        ),
        dropped_tokens=sum(source.dropped for source in packed) if packed else None,
    )


def _column(table: pa.Table, name: str) -> ReportedColumn:
    column = table.column(name)
    values = tuple(_short(value) for value in column.slice(0, SHOWN).to_pylist())
    items, longest = None, None
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = pc.list_value_length(column)
        items, longest = float(pc.mean(lengths).as_py() or 0), int(pc.max(lengths).as_py() or 0)
    return ReportedColumn(
        name=name, type=str(column.type), nulls=column.null_count, values=values, items=items, longest=longest
    )


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, bytes)) else str(value)
    return text if len(text) <= LONG else f"{text[: LONG - 3]}..."
