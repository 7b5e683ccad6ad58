"""Read Lance datasets: folders in which each version has a manifest, which names the files of its rows."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

from raytrain_plus.data.convert.formats.record_blocks import RecordBlock, Records
from raytrain_plus.data.paths.file_tree import tree_of
from raytrain_plus.errors import DataError, first_line
from raytrain_plus.storage.place import Place

_VERSIONS, _OF_ROWS = "_versions", ("data", "_deletions")
"""The folder of the manifests, and those with what a manifest names."""
_LAST, _DIGITS = 2**64 - 1, 20
"""A name of so many digits is the last number less the version, so that a listing begins with the newest one."""
BATCH_BYTES, BATCH_ROWS = 4 << 20, 8192
"""Bytes, roughly, and rows of a batch; a larger row makes a larger one."""
_BUFFER_BYTES = 32 << 20
"""Bytes that are read ahead; Lance's own default is 2 GB."""
_UNREADABLE = (OSError, ValueError, RuntimeError, pa.ArrowException)
"""The errors that Lance raises; it has no types of its own."""


class LanceRows(Records):
    """All rows belong to the first file, the manifest; a position is the number of a row."""

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        """`root`: the folder of the dataset. `files`: as `lance_files` returns them."""
        self._root, self._manifest = root, files[0]
        self._bytes = sum(file.stat().st_size for file in files)

    @override
    def schema(self, files: Sequence[Path], *, whole: bool) -> pa.Schema:
        with self._opened() as dataset:
            found: pa.Schema = self._scanner(dataset, 0).projected_schema
            return found.remove_metadata()

    @override
    def blocks(self, file: Path, schema: pa.Schema, begin: int) -> Iterator[RecordBlock]:
        if file != self._manifest:
            return
        with self._opened() as dataset:
            rows = dataset.count_rows()
            for batch in self._scanner(dataset, begin).to_batches():
                if batch.num_rows:
                    table = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
                    yield RecordBlock(table, begin, self._bytes * (begin + batch.num_rows) // rows)
                    begin += batch.num_rows

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the version of the manifest, whichever is the newest by now."""
        lance = _load_lance()
        try:
            yield lance.dataset(str(self._root), version=_version_of(self._manifest.name))
        except _UNREADABLE as error:
            # The rest says where in Lance's source it was raised.
            why = first_line(error).partition(", /")[0]
            raise DataError(f"is not a readable Lance dataset: {why}", where=str(self._root)) from error

    def _scanner(self, dataset: Any, begin: int) -> Any:
        """Return what reads the rows from number `begin` on, in order."""
        return dataset.scanner(
            offset=begin,
            # Lance's own bound on the bytes of a batch reads all that comes after it too, into memory.
            batch_size=min(BATCH_ROWS, max(1, BATCH_BYTES * dataset.count_rows() // self._bytes)),
            io_buffer_size=_BUFFER_BYTES,
            batch_readahead=1,
            fragment_readahead=1,
            scan_in_order=True,
            # Without it, where they are stored.
            blob_handling="all_binary",
        )


def lance_files(folder: Place) -> list[Place]:
    """Return the manifest of the newest version of a Lance dataset, then the files that can hold its rows.

    Raises `DataError` if `folder` is none.
    """
    tree = tree_of(folder)
    is_folder = tree.kind(folder) == "folder"
    below = {_parts(file, folder): file for file in tree.walk(folder, hidden=True)} if is_folder else {}
    versions = {version: parts for parts in below if (version := _version_at(parts)) is not None}
    if not versions:
        inside = sorted({parts[0] for parts in below if _version_at(parts[1:]) is not None})
        raise _no_dataset(folder, inside, is_folder)
    rows = sorted(parts for parts in below if len(parts) > 1 and parts[0] in _OF_ROWS)
    return [below[parts] for parts in (versions[max(versions)], *rows)]


def _parts(file: Place, folder: Place) -> tuple[str, ...]:
    return file.relative_to(folder).parts  # type: ignore[arg-type]


def _version_at(parts: Sequence[str]) -> int | None:
    return _version_of(parts[1]) if len(parts) == 2 and parts[0] == _VERSIONS else None


def _version_of(name: str) -> int | None:
    """Return the version whose manifest has this name; None for other files, and versions outside the history."""
    number, _, suffix = name.partition(".")
    if suffix != "manifest" or not number.isdecimal():
        return None
    return _LAST - int(number) if len(number) == _DIGITS else int(number)


def _no_dataset(folder: Place, inside: Sequence[str], is_folder: bool) -> DataError:
    if inside:
        return DataError(
            f"holds several Lance datasets: {', '.join(inside[:3])}{', ...' * (len(inside) > 3)}"
            if len(inside) > 1
            else f"is not itself a Lance dataset, but holds {inside[0]}",
            where=str(folder),
            remedy=f"name {'one of them, such as ' * (len(inside) > 1)}{folder / inside[0]}"
            + ", or mix them with data.mix" * (len(inside) > 1),
        )
    return DataError(
        f"is not a Lance dataset: {f'it has no manifest in {_VERSIONS}' if is_folder else 'it is not a folder'}",
        where=str(folder),
        expected="the folder that lance.write_dataset has written, and no pattern",
    )


def _load_lance() -> Any:
    """Return the module `lance`. Raises `DataError` if pylance is not installed."""
    try:
        import lance
    except ModuleNotFoundError:
        raise DataError(
            "Lance datasets need the Python package pylance, which is not installed",
            where=sys.executable,
            remedy='run `pip install "raytrain-plus[lance]"` on every machine',
        ) from None
    # It warns of each process that is forked, also before another program is started in it, as Ray does.
    warnings.filterwarnings("ignore", "lance is not fork-safe")
    return lance
