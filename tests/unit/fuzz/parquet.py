"""Damage Parquet files (flipped, lost and foreign bytes) and check what reading them gives.

Reading a damaged file must raise one of our errors or give the rows that were written. Parquet has no checksum for its
footer: a damaged footer that still parses must at least be noticed as a different one, which stops a run that has seen
the file before.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.data.sources.source import Source
from raytrain_plus.errors import RaytrainError
from tests.unit.fuzz.verdict import Fault, limited

SETTINGS: tuple[dict[str, object], ...] = (
    {},
    {"compression": "none"},
    {"compression": "zstd", "data_page_version": "2.0"},
    {"compression": "gzip", "use_dictionary": False},
    {"compression": "none", "use_dictionary": False, "data_page_size": 64},
    {
        "compression": "snappy",
        "data_page_version": "2.0",
        "column_encoding": "DELTA_BINARY_PACKED",
        "use_dictionary": False,
    },
    {"write_statistics": False, "store_schema": False, "write_page_index": True},
)


@dataclass(frozen=True, slots=True)
class Base:
    """An undamaged file."""

    data: bytes
    seen: Source
    units: tuple[pa.Table, ...]
    footer: int
    """Offset of its footer."""


def bases_in(folder: Path) -> list[Base]:
    """Return files of every kind, each in its own folder."""
    return [_base(folder / str(number), number) for number in range(2 * len(SETTINGS))]


def _base(folder: Path, number: int) -> Base:
    folder.mkdir()
    settings = dict(SETTINGS[number % len(SETTINGS)])
    table = _rich(40) if number < len(SETTINGS) else _plain(40)
    if "column_encoding" in settings:
        table = _plain(40)
    file = folder / "x.parquet"
    pq.write_table(table, file, row_group_size=16, write_page_checksum=True, **settings)
    data, seen = file.read_bytes(), parquet_source(folder)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return Base(data, seen, tuple(seen.read_unit(unit) for unit in range(len(seen.unit_rows))), footer)


def _plain(rows: int) -> pa.Table:
    return pa.table({"x": pa.array(np.arange(rows)), "y": pa.array(np.arange(rows) % 3, pa.int32())})


def _rich(rows: int) -> pa.Table:
    return pa.table(
        {
            "x": pa.array(np.arange(rows)),
            "f": pa.array(np.linspace(0, 1, rows), pa.float32()),
            "b": pa.array([row % 2 == 0 for row in range(rows)]),
            "s": pa.array([f"row {row}" if row % 5 else None for row in range(rows)]),
            "l": pa.array([list(range(row % 4)) for row in range(rows)], pa.list_(pa.int16())),
            "t": pa.array([{"a": row, "b": str(row)} for row in range(rows)]),
            "v": pa.array([[row, row + 1] for row in range(rows)], pa.list_(pa.float32(), 2)),
            "d": pa.array(["a", "b"] * (rows // 2)).dictionary_encode(),
            "z": pa.array(np.arange(rows), pa.timestamp("us")),
        }
    )


def damaged(base: Base, draw: random.Random) -> bytes:
    """Return the damaged bytes of a file; the footer is damaged more often than its size alone would imply."""
    data = bytearray(base.data)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        if not data:
            break
        low = base.footer if draw.random() < 0.6 and base.footer < len(data) else 0
        at = draw.randrange(low, len(data))
        kind = draw.randrange(8)
        if kind < 3:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 3:
            data[at] = draw.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 4:
            data[at : at + draw.choice([1, 8, 100])] = b""
        elif kind == 5:
            data[at:at] = draw.choice([b"\0", b"\xff" * 9, b"PAR1", draw.randbytes(20)])
        elif kind == 6:
            del data[at:]
        else:
            size = draw.choice([4, 8, 50])
            data[at : at + size] = draw.choice([bytes(size), b"\xff" * size, draw.randbytes(size)])
    return bytes(data)


def check(seed: int, bases: list[Base]) -> str:
    """Try one damaged file; return `refused`, `noticed` (the footer differs) or `same`."""
    draw = random.Random(seed)
    base = draw.choice(bases)
    data = damaged(base, draw)
    return check_file(base, data)


def check_file(base: Base, data: bytes) -> str:
    """Try given bytes. Raises `Fault`, or the exception that should not have escaped."""
    file = Path(base.seen.named) / "x.parquet"
    file.write_bytes(data)
    # A disk that damages a file does not change its modification time; a program would.
    times = file.stat().st_atime_ns, base.seen.sights[0].modified_ns
    os.utime(file, ns=times)
    with limited():
        # First for a run that saw the undamaged file, then for a run that starts now.
        before = _read(base.seen, base)
        try:
            seen = parquet_source(base.seen.named)
        except RaytrainError as error:
            _words(error)
            return "refused"
        alike = seen.fingerprint == base.seen.fingerprint
        if alike and seen.describe() != base.seen.describe():
            raise Fault("two files with one fingerprint are two datasets")
        after = _read(seen, base) if alike else _whatever(seen)
    if before == "other" or (alike and after == "other"):
        raise Fault(
            f"other rows were read than were written, by a run that {'begins' if before != 'other' else 'saw the file'}"
        )
    return after if alike else "noticed"


def _whatever(seen: Source) -> str:
    """Read a dataset that counts as another one: it must give the rows that it claims, or one of our errors."""
    for unit, rows in enumerate(seen.unit_rows):
        try:
            table = seen.read_unit(unit)
        except RaytrainError as error:
            _words(error)
            return "refused"
        if table.num_rows != rows:
            raise Fault(f"{table.num_rows} rows were read of a unit that has {rows}")
    return "same"


def _read(seen: Source, base: Base) -> str:
    """Read every unit; return whether its rows are the `same` as written, `other` ones, or `refused`."""
    found = "same"
    for unit, written in enumerate(base.units):
        try:
            table = seen.read_unit(unit)
        except RaytrainError as error:
            _words(error)
            return "refused"
        if not table.equals(written):
            found = "other"
    return found


def _words(error: RaytrainError) -> None:
    if not str(error).strip() or ("x.parquet" not in str(error) and "rows" not in str(error)):
        raise Fault(f"{type(error).__name__} does not say which file: {error}")
