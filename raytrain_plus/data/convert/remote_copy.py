"""Copy remote files into the cache, where they are converted: each file whole or not at all, those that are missing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from raytrain_plus.errors import DataError, first_line
from raytrain_plus.storage.address import check_name
from raytrain_plus.storage.place import Place, RemotePath, StoreEntry, in_parallel

READERS = 8
"""Files that are copied at the same time."""
CHUNK_BYTES = 16 << 20
"""Bytes of one read."""
SUFFIX = ".copy"


def copy_folder(target: Path) -> Path:
    """Return the folder for a copy of what is converted to `target`."""
    return target.with_name(f".{target.name}{SUFFIX}")


def remove_copies(target: Path, but: Path | None = None) -> None:
    """Remove the copy for a conversion, and those of earlier versions of the same data, except `but`."""
    kind = target.name.rpartition("-")[0]
    for folder in target.parent.glob(f".{kind}-*{SUFFIX}"):
        if folder != but:
            shutil.rmtree(folder, ignore_errors=True)


def entries_of(files: Sequence[Place]) -> list[StoreEntry]:
    """Return what a store says about remote files. Raises `DataError` if one does not exist."""

    def look(file: Place) -> StoreEntry:
        assert isinstance(file, RemotePath)
        try:
            entry = file.entry or file.look()
        except OSError as error:
            raise DataError(f"cannot be accessed: {first_line(error)}", where=str(file)) from error
        if entry is None:
            raise DataError("there is no such file", where=str(file))
        return entry

    return list(in_parallel(look, files))


def copied(root: RemotePath, files: Sequence[Place], folder: Path, told: Callable[[int, int], None]) -> list[Path]:
    """Copy files below `root` into a folder, except those that an earlier process has copied; return the copies.

    Raises `DataError` if one cannot be read, and `OSError` if one cannot be written.
    """
    entries = entries_of(files)
    targets = [folder / check_name(file.relative_to(root).as_posix()) for file in files]  # type: ignore[arg-type]
    total, done, one_at_a_time, stop = sum(entry.size for entry in entries), 0, threading.Lock(), threading.Event()

    def count(read: int) -> None:
        nonlocal done
        with one_at_a_time:
            done += read
            told(done, total)

    def copy(number: int) -> None:
        file, size, target = files[number], entries[number].size, targets[number]
        assert isinstance(file, RemotePath)
        if target.exists() and target.stat().st_size == size:
            count(size)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        with part.open("wb") as out:
            while out.tell() < size and not stop.is_set():
                count(out.write(_chunk(file, out.tell(), size)))
        if not stop.is_set():
            part.rename(target)

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(READERS, thread_name_prefix="copy-data") as pool:
        try:
            for _ in pool.map(copy, range(len(files))):
                pass
        finally:
            stop.set()
    return targets


def _chunk(file: RemotePath, begin: int, size: int) -> bytes:
    wanted = min(CHUNK_BYTES, size - begin)
    try:
        found: bytes = file.read(lambda opened: opened.read_at(wanted, begin))
    except OSError as error:
        raise DataError(f"cannot be copied: {first_line(error)}", where=str(file)) from error
    if len(found) != wanted:
        raise DataError(f"ends after {begin + len(found):,} bytes; it had {size:,}", where=str(file))
    return found


def named_remotely(error: DataError, folder: Path, root: RemotePath) -> DataError:
    """Return the same error with the addresses of the files in place of the paths of their copies."""
    texts = (error.what, error.where, error.expected, error.remedy)
    return DataError(*(text.replace(str(folder), str(root)) for text in texts))
