"""Windows of a stream of token numbers: the setting `data.windows`. Rows are copied from files mapped into memory.

A file has a window of `length` tokens, and the token behind each, at every multiple of `stride`; none crosses into
another file. Units are blocks of as many positions. If the job shuffles, positions are scattered over their file:
position p is window `permuted(mix(number of the file, windows), windows, p)`, the same in all epochs and for all
readers. So a block holds windows from all over the file, and nothing is shuffled through a buffer.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from raytrain_plus.data.ledger.ledger import ROW_ID, row_ids
from raytrain_plus.data.order.keyed_permutation import permuted
from raytrain_plus.data.order.sample_order import mix
from raytrain_plus.data.paths.files import find_files, names_below
from raytrain_plus.data.paths.sight import Sight, change_of, sight_of
from raytrain_plus.data.sources.source import Source, cast_rows, within
from raytrain_plus.data.values.columns import column_of
from raytrain_plus.data.values.token_stream import SUFFIXES, digest_of, mapped
from raytrain_plus.data.values.tokens import IDS
from raytrain_plus.errors import DataChanged, DataError
from raytrain_plus.job.setting_types import Numbers
from raytrain_plus.storage.place import Place, RemotePath, place_of, spelled

TARGETS = "targets"
"""The column of the tokens that follow those of `input_ids`."""
BLOCK = 256
"""Windows of a block; more if there would be more than `BLOCKS`."""
BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowsSource(Source):
    """See the module docstring. `fingerprint`: over the files' names and `digest_of` each, not over all numbers."""

    root: str
    """The folder that `files` are relative to."""
    files: tuple[str, ...]
    """File names relative to `root`, sorted."""
    file_bytes: tuple[int, ...]
    file_digests: tuple[str, ...]
    file_windows: tuple[int, ...]
    """For each file, its windows."""
    numbers: Numbers | None
    """The type of the numbers, as the job says it."""
    length: int
    """Tokens of a window."""
    stride: int
    """Tokens between the beginnings of two windows."""
    block: int
    """Positions of a block; the last one of a file has fewer."""
    scattered: bool
    """Whether positions are scattered over their file."""
    sights: tuple[Sight, ...] = field(compare=False)
    """For each file, its `stat` on this node. Differs from node to node."""

    @property
    @override
    def by_index(self) -> bool:
        return True

    @property
    @override
    def in_memory(self) -> bool:
        return True

    @property
    @override
    def user_files(self) -> Mapping[str, int]:
        return {str(self.file(number)): size for number, size in enumerate(self.file_bytes)}

    def file(self, number: int) -> Path:
        """Return the path of file `number`."""
        return Path(self.root) / self.files[number]

    @override
    def describe(self) -> dict[str, Any]:
        blocks = iter(self.unit_rows)
        entries = zip(self.files, self.file_bytes, self.file_digests, self.file_windows, strict=True)
        return {
            "path": self.named,
            "windows": {"length": self.length, "stride": self.stride},
            "fingerprint": self.fingerprint,
            "rows": self.rows,
            # The blocks as the row groups of Parquet files.
            "files": [
                {
                    "path": path,
                    "bytes": size,
                    "footer_sha256": digest,
                    "row_groups": list(itertools.islice(blocks, _blocks(windows, self.block))),
                }
                for path, size, digest, windows in entries
            ],
        }

    @override
    def read_as(self, schema: pa.Schema) -> WindowsSource:
        return replace(self, schema=schema)

    @override
    def name(self, unit: int) -> str:
        return f"{self.file_of(unit)}, block {self._place(unit)[1]}"

    @override
    def file_of(self, unit: int) -> str:
        return str(self.file(self._place(unit)[0]))

    @override
    def name_rows(self, unit: int, rows: Sequence[int]) -> str:
        begins = (self._windows(unit, np.array(rows)) * self.stride).tolist()
        said = f"the window{'s' * (len(begins) != 1)} at token{'s' * (len(begins) != 1)}"
        return f"{said} {', '.join(map(str, begins))} of {self.file_of(unit)}"

    @override
    def read_unit(self, unit: int, prefix: str = "") -> pa.Table:
        return self.read_rows(unit, np.arange(self.unit_rows[unit]), prefix)

    @override
    def read_rows(self, unit: int, rows: npt.NDArray[np.int64], prefix: str = "") -> pa.Table:
        number, block = self._place(unit)
        # A page beyond the end of a file that has shrunk cannot be read, and ends the process.
        self.check_unchanged(number)
        windows = _opened(self.file(number), self.numbers, self.sights[number], self.length)
        tokens = windows[self._windows(unit, rows) * self.stride].astype(np.int64)
        # Again, so that it covers changes up to the end of the read.
        self.check_unchanged(number)
        table = pa.table(
            [
                pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), self.length)
                for values in (tokens[:, :-1], tokens[:, 1:])
            ],
            schema=_schema(self.length),
        )
        if not self.schema.equals(table.schema):
            table = cast_rows(table, self.schema, self.name(unit))
        ids = row_ids(prefix + self.files[number], block, self.unit_rows[unit])[rows]
        return table.append_column(ROW_ID, column_of(ids))

    def check_unchanged(self, *numbers: int) -> None:
        """Compare files, by number, with the `stat` first taken; all files by default.

        Raises `DataChanged` if one has changed, `DataError` if one cannot be accessed.
        """
        for number in numbers or range(len(self.files)):
            file = self.file(number)
            try:
                found = change_of(file, self.sights[number], None)
            except OSError as error:
                raise DataError(f"cannot be accessed: {error.strerror}", where=str(file)) from error
            if found:
                raise DataChanged(
                    f"the file changed while the run used it: {found}",
                    where=f"{file} on {os.uname().nodename}",
                    remedy="restore the file with its modification time and resume the run, or start over with "
                    "--fresh; do not change the data while a run uses it",
                )

    def _place(self, unit: int) -> tuple[int, int]:
        """Return the number of the file that a unit is in, and the number of the block there."""
        firsts = _firsts(self.file_windows, self.block)
        number = bisect.bisect_right(firsts, unit) - 1
        return number, unit - firsts[number]

    def _windows(self, unit: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the windows at these places of a block."""
        number, block = self._place(unit)
        positions, count = block * self.block + places, self.file_windows[number]
        return permuted(mix(number, count), count, positions) if self.scattered else positions


def windows_of(
    path: str | Place, numbers: Numbers | None, length: int, stride: int, *, scattered: bool
) -> WindowsSource:
    """Return the source of the windows of the files at a path of this machine; each file is a stream of its own.

    `numbers`: see `mapped`. `scattered`: see `WindowsSource`. Raises `DataError` if there are no such files, or one is
    shorter than a window, and the errors of `mapped`.
    """
    base = place_of(path)
    if isinstance(base, RemotePath):
        raise DataError(
            "data.windows reads files of this machine, and cannot read at an address",
            where=str(base),
            remedy="copy the files to each node or to a shared folder, in data.prepare for example",
        )
    found = find_files(base, SUFFIXES, "stream")
    digest = hashlib.sha256(f"windows\0{length}\0{stride}\0".encode())
    counts, digests, sights = list[int](), list[str](), list[Sight]()
    for name, file in zip(found.names, found.places, strict=True):
        assert isinstance(file, Path)
        stream = mapped(file, numbers)
        if len(stream) <= length:
            raise DataError(
                f"its {len(stream):,} tokens are too few for a window of {length:,} and the token behind it",
                where=str(file),
                remedy="use a longer file, or a smaller data.windows",
            )
        counts.append((len(stream) - length - 1) // stride + 1)
        sights.append(sight_of(file))
        digests.append(digest_of(file))
        digest.update(f"{name}\0{stream.dtype.str}\0{digests[-1]}\0".encode())
    block = BLOCK
    while sum(counts) > block * BLOCKS:
        block *= 2
    unit_rows = tuple(min(block, windows - begin) for windows in counts for begin in range(0, windows, block))
    return WindowsSource(
        named=spelled(base),
        unit_rows=unit_rows,
        unit_bytes=tuple(2 * 8 * length * rows for rows in unit_rows),
        schema=_schema(length),
        fingerprint=digest.hexdigest(),
        root=spelled(found.root),
        files=found.names,
        file_bytes=tuple(sight.size for sight in sights),
        file_digests=tuple(digests),
        file_windows=tuple(counts),
        numbers=numbers,
        length=length,
        stride=stride,
        block=block,
        scattered=scattered,
        sights=tuple(sights),
    )


def are_streams(path: str | Place) -> bool:
    """Return whether a path names files of token numbers, as their names say."""
    base = place_of(path)
    return any(name.lower().endswith(SUFFIXES) for name in (base.name, *names_below(base)))


def check_windows(data: Source) -> None:
    """Compare all files of windows with the `stat` that was first taken. See `WindowsSource.check_unchanged`."""
    for one in within(data, WindowsSource):
        one.check_unchanged()


@functools.lru_cache
def _schema(length: int) -> pa.Schema:
    kind = pa.list_(pa.int64(), length)
    return pa.schema([(IDS, kind), (TARGETS, kind)])


def _blocks(windows: int, block: int) -> int:
    return -(-windows // block)


@functools.lru_cache
def _firsts(file_windows: tuple[int, ...], block: int) -> list[int]:
    """Return the number of the first block of each file."""
    return list(itertools.accumulate((_blocks(one, block) for one in file_windows[:-1]), initial=0))


@functools.lru_cache
def _opened(file: Path, numbers: Numbers | None, sight: Sight, length: int) -> npt.NDArray[Any]:
    """Return all windows of a file, with the token behind each. `sight`: a file that was replaced is another one."""
    return np.lib.stride_tricks.sliding_window_view(mapped(file, numbers), length + 1)
