"""Convert data that is not Parquet, once per node, into Parquet in the user's cache: the same rows in the same order.

Row groups have a fixed number of rows, counted over all files, so the same rows become the same row groups whichever
format they had. A conversion that was killed continues after its last complete part. It appears in the cache when it is
complete. The name of its folder contains a digest of the sources' names, sizes and times: changed ones are converted
again. Remote files are copied beside the conversion first; the copy is removed when the conversion is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from raytrain_plus.data.convert.cache import made_once
from raytrain_plus.data.convert.formats.arrow_batches import ArrowBatches
from raytrain_plus.data.convert.formats.csv_rows import CsvRows
from raytrain_plus.data.convert.formats.formats import SAVED, SAVED_INFO, SAVED_SPLITS, SUFFIXES
from raytrain_plus.data.convert.formats.image_files import ImageFiles
from raytrain_plus.data.convert.formats.jsonl import JsonLines
from raytrain_plus.data.convert.formats.lance_rows import LanceRows, lance_files
from raytrain_plus.data.convert.formats.record_blocks import Records, Unfit
from raytrain_plus.data.convert.formats.tar_samples import TarSamples
from raytrain_plus.data.convert.formats.text_lines import TextLines
from raytrain_plus.data.convert.parts import ConvertedParts, Progress, begin_again, load_progress, unwritable
from raytrain_plus.data.convert.remote_copy import copied, copy_folder, entries_of, named_remotely, remove_copies
from raytrain_plus.data.paths.files import find_files, is_file, split_pattern
from raytrain_plus.data.values.labels import Labels, labels_of
from raytrain_plus.errors import DataError, StorageError
from raytrain_plus.job.setting_types import Format
from raytrain_plus.storage.place import Place, RemotePath, spelled

READERS: Mapping[Format, Callable[[], Records]] = {
    "jsonl": JsonLines,
    "csv": CsvRows,
    "arrow": ArrowBatches,
    "huggingface": ArrowBatches,
    "text": TextLines,
    "webdataset": TarSamples,
}
"""For each format that is converted, what reads it; images and Lance need more: see `_reader`."""
_VERSION = 2
"""Raised when the same source is to be converted differently; 2 has a digest of the content."""

Told = Callable[[int, int], None]
"""Called now and then with the bytes of the source that are read, and those that there are."""


def source_files(path: Place, format_: Format) -> list[Place]:
    """Return the files of the data at a place, in the order of their rows. Raises `DataError` without any."""
    if format_ == "huggingface":
        return _saved_files(path)
    if format_ == "lance":
        return lance_files(path)
    return list(find_files(path, SUFFIXES[format_], format_).places)


def _saved_files(folder: Place) -> list[Place]:
    """Return the files of a folder that `save_to_disk` has written."""
    if is_file(folder / SAVED_SPLITS):
        splits = _json_of(folder / SAVED_SPLITS).get("splits", [])
        raise DataError(
            f"holds several splits: {', '.join(splits)}",
            where=str(folder),
            remedy=f"name one of them, such as {folder / (splits or ['train'])[0]}",
        )
    found = _json_of(folder / SAVED)
    if found.get("_indices_data_files"):
        raise DataError(
            "holds its rows in another order than its files",
            str(folder),
            remedy="flatten_indices() before save_to_disk",
        )
    return [folder / one["filename"] for one in found.get("_data_files", [])]


def saved_labels(folder: Place) -> Labels:
    """Return the classes that a folder names that `save_to_disk` has written."""
    file = folder / SAVED_INFO
    return labels_of(_json_of(file).get("features") or {}) if is_file(file) else {}


def _json_of(file: Place) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    except StorageError as error:
        raise DataError(f"cannot be read: {error}", where=str(file)) from error


def converted(
    path: Place, format_: Format, told: Told, cache: Path, copying: Told | None = None, *, skip: bool = False
) -> Path:
    """Return the folder with the Parquet files made of the data at a place; make them if they are missing.

    `copying`: called in place of `told` while remote files are copied. `skip`: see `dataset.dataset`. Raises
    `DataError` for data that cannot be read as this format, and `WaitExpired` if another process converts it for more
    than `LOCK_S`.
    """
    files = source_files(path, format_)
    target = cache / folder_name(path, format_, files)

    def write(partial: Path) -> None:
        try:
            if isinstance(path, RemotePath):
                _convert_copy(path, format_, files, target, partial, told, copying or told, skip=skip)
            else:
                local = [file for file in files if isinstance(file, Path)]
                _write_all(local, _reader(_root(path), format_, local, skip=skip), partial, told)
        except DataError:
            # If the files have changed, that explains the error better.
            _check_unchanged(path, format_, target)
            raise
        _check_unchanged(path, format_, target)

    made_once(target, str(path), write)
    return target


def sizes_of(files: Sequence[Place]) -> list[int]:
    """Return the sizes of files in bytes."""
    if any(isinstance(file, RemotePath) for file in files):
        return [entry.size for entry in entries_of(files)]
    return [file.stat().st_size for file in files if isinstance(file, Path)]


def folder_name(path: Place, format_: Format, files: Sequence[Place]) -> str:
    """Return the name of the folder for what these files are converted to: other files, or other times, another one."""
    return name_of(path.stem, f"{_VERSION}\0{format_}\0{pa.__version__}\0{spelled(path)}", files)


def name_of(plain: str, kind: str, files: Sequence[Place], more: str = "") -> str:
    """Return the name of a folder for what is made of these files.

    `plain`: for people. `kind`: what is made, and of which data; `earlier` finds folders that agree in it. `more`: the
    content that is in no file.
    """
    what = hashlib.sha256(more.encode())
    remote = [file for file in files if isinstance(file, RemotePath)]
    for one, entry in zip(remote, entries_of(remote), strict=True):
        what.update(f"{one}\0{entry.size}\0{entry.modified_ns}\0".encode())
    for file in [file for file in files if isinstance(file, Path)]:
        try:
            seen = file.stat()
        except OSError as error:
            raise DataError(f"cannot be accessed: {error.strerror}", where=str(file)) from error
        what.update(f"{file}\0{seen.st_size}\0{seen.st_mtime_ns}\0{seen.st_ctime_ns}\0{seen.st_ino}\0".encode())
    letters = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in plain)[:40]
    return f"{letters}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}-{what.hexdigest()[:8]}"


def earlier(target: Path) -> list[Path]:
    """Return the folders of earlier conversions of the same data, which has changed since."""
    kind = target.name.rpartition("-")[0]
    return [folder for folder in target.parent.glob(f"{kind}-*") if folder != target]


def _convert_copy(
    path: RemotePath,
    format_: Format,
    files: Sequence[Place],
    target: Path,
    partial: Path,
    told: Told,
    copying: Told,
    *,
    skip: bool,
) -> None:
    """Copy remote files, convert the copy and remove it; an error names the remote files."""
    root, copy = _root(path), copy_folder(target)
    assert isinstance(root, RemotePath)
    remove_copies(target, but=copy)
    local = copied(root, files, copy, copying)
    try:
        _write_all(local, _reader(copy, format_, local, skip=skip), partial, told)
    except DataError as error:
        remove_copies(target)
        raise named_remotely(error, copy, root) from error
    remove_copies(target)


def _root(path: Place) -> Place:
    """Return the folder that the files of the data at `path` are in, directly or in folders below it."""
    root = split_pattern(path)[0]
    return root.parent if is_file(root) else root


def _reader(root: Place, format_: Format, files: Sequence[Path], *, skip: bool) -> Records:
    if format_ == "images":
        return ImageFiles(Path(str(root)), files, check=not skip)
    if format_ == "lance":
        return LanceRows(Path(str(root)), files)
    return READERS[format_]()


def _write_all(files: Sequence[Path], reader: Records, partial: Path, told: Told) -> None:
    """Write all parts, or those that an earlier process has left."""
    progress = load_progress(partial)
    if progress is None:
        progress = begin_again(partial, Progress.of(_columns(reader, files, whole=False)))
    try:
        _write(files, reader, partial, progress, told)
    except Unfit as unfit:
        whole = _columns(reader, files, whole=True)
        if whole == progress.columns:
            raise unfit.error from None
        _write(files, reader, partial, begin_again(partial, Progress.of(whole)), told)


def _columns(reader: Records, files: Sequence[Path], *, whole: bool) -> pa.Schema:
    """Return the columns of all files; see `Records.schema`. Raises `DataError` for one that Parquet cannot hold."""
    columns = reader.schema(files, whole=whole)
    names = unwritable(columns)
    if names and not whole:
        # Other rows may have values there.
        return _columns(reader, files, whole=True)
    if names:
        raise DataError(
            f"column '{names[0]}' is {columns.field(names[0]).type}, which Parquet cannot hold",
            where=str(files[0] if len(files) == 1 else files[0].parent),
            remedy="write values of a plain type there, or remove the column",
        )
    return columns


def _check_unchanged(path: Place, format_: Format, target: Path) -> None:
    """Raise `DataError` if the files are not those that were there when the conversion to `target` began."""
    if folder_name(path, format_, source_files(path, format_)) != target.name:
        raise DataError(
            "the files changed while they were converted", str(path), remedy="run again when they no longer change"
        )


def _write(files: Sequence[Path], reader: Records, partial: Path, progress: Progress, told: Told) -> None:
    parts, sizes, columns = ConvertedParts(partial, progress), [file.stat().st_size for file in files], progress.columns
    # There may be a million files.
    before, total = sum(sizes[: progress.file]), sum(sizes)
    for number in range(progress.file, len(files)):
        begin = progress.begin if number == progress.file else 0
        for block in reader.blocks(files[number], columns, begin):
            parts.add(block, number)
            told(before + block.read, total)
        before += sizes[number]
    parts.end()
