"""A disk that stops after any number of calls, and its contents after the machine restarts."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raytrain_plus.storage.folders.local import Disk


class Stopped(BaseException):
    """The machine has stopped; no handler catches it."""


class Recorder(Disk):
    """A disk that records its calls and stops before call number `stop`."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.calls: list[tuple[Any, ...]] = []
        self._paths: dict[int, int] = {}
        self._files = 0

    def _next(self, *call: Any) -> None:
        if self.stop is not None and len(self.calls) >= self.stop:
            raise Stopped(call)
        self.calls.append(call)

    def mkdir(self, folder: Path) -> None:
        self._next("mkdir", folder)
        super().mkdir(folder)

    def open(self, path: Path) -> int:
        self._files += 1
        self._next("open", path, self._files)
        file = super().open(path)
        self._paths[file] = self._files
        return file

    def write(self, file: int, data: memoryview) -> int:
        # Only a part at once, as a disk may do.
        some = data[: max(1, len(data) // 2)]
        self._next("write", self._paths[file], bytes(some))
        return super().write(file, some)

    def fsync(self, file: int) -> None:
        self._next("fsync", self._paths[file])
        super().fsync(file)

    def rename(self, path: Path, to: Path) -> None:
        self._next("rename", path, to)
        super().rename(path, to)

    def link(self, path: Path, to: Path) -> None:
        self._next("link", path, to)
        super().link(path, to)

    def unlink(self, path: Path) -> None:
        self._next("unlink", path)
        super().unlink(path)

    def rmtree(self, folder: Path) -> None:
        self._next("rmtree", folder)
        super().rmtree(folder)

    def fsync_folder(self, folder: Path) -> None:
        self._next("fsync_folder", folder)
        super().fsync_folder(folder)


class Full(Disk):
    """A disk that is full at `write` or `fsync`; as the system does, its error names no file."""

    def __init__(self, call: str) -> None:
        self.call = call

    def write(self, file: int, data: memoryview) -> int:
        if self.call == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(file, data)

    def fsync(self, file: int) -> None:
        if self.call == "fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().fsync(file)


class Linkless(Disk):
    """A file system without hard links."""

    def link(self, path: Path, to: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path), None, str(to))


def survives(calls: list[tuple[Any, ...]], names: bool, data: bool) -> dict[Path, bytes]:
    """Return the files on the disk after the machine stopped.

    With `names` and `data`, names and bytes that were not made durable survive too. The names in a folder, including
    those of folders, are durable after its fsync, and a file's bytes after the file's own.
    """
    unsafe: set[Path] = set()
    volatile: dict[int, bytes] = {}
    durable: dict[int, bytes] = {}
    now: dict[Path, int] = {}
    kept: dict[Path, int] = {}
    for call in calls:
        kind, what = call[0], call[1]
        if kind == "mkdir":
            unsafe.add(what)
        elif kind == "open":
            now[what] = call[2]
            volatile[call[2]] = durable[call[2]] = b""
        elif kind == "write":
            volatile[what] += call[2]
        elif kind == "fsync":
            durable[what] = volatile[what]
        elif kind == "rename":
            now[call[2]] = now.pop(what)
        elif kind == "link":
            if call[2] not in now:
                now[call[2]] = now[what]
        elif kind == "unlink":
            now.pop(what, None)
        elif kind == "rmtree":
            now = {path: file for path, file in now.items() if what not in path.parents}
        elif kind == "fsync_folder":
            unsafe = {folder for folder in unsafe if folder.parent != what}
            kept = {path: file for path, file in kept.items() if path.parent != what}
            kept |= {path: file for path, file in now.items() if path.parent == what}
    kept = {path: file for path, file in kept.items() if not unsafe & set(path.parents)}
    found, bytes_of = (now if names else kept), (volatile if data else durable)
    return {path: bytes_of[file] for path, file in found.items()}


def after_every_stop(folder: Path, work: Callable[[Disk], None], check: Callable[[Path], None]) -> int:
    """Run `work` on disks that stop before each of its calls, `check` on what survives; return the number of calls.

    `folder` holds the initial files, which are restored each time. What survives more than one stop is checked once,
    except after complete work: the last three checks.
    """
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    whole = Recorder()
    work(whole)
    checked: set[frozenset[tuple[Path, bytes]]] = set()
    for stop in range(len(whole.calls) + 1):
        restore(folder, before)
        disk = Recorder(stop)
        try:
            work(disk)
        except Stopped:
            assert stop < len(whole.calls)
        for names, data in ((False, False), (True, False), (True, True)):
            earlier = [("open", path, -index) for index, path in enumerate(before, 1)]
            earlier += [("write", -index, content) for index, content in enumerate(before.values(), 1)]  # type: ignore[misc]
            earlier += [("fsync", -index, b"") for index, _ in enumerate(before, 1)]  # type: ignore[misc]
            earlier += [("fsync_folder", folder, b"") for folder in {path.parent for path in before}]  # type: ignore[misc]
            found = survives([*earlier, *disk.calls], names, data)
            if frozenset(found.items()) not in checked or stop == len(whole.calls):
                checked.add(frozenset(found.items()))
                restore(folder, found)
                check(folder)
    restore(folder, before)
    return len(whole.calls)


def restore(folder: Path, files: dict[Path, bytes]) -> None:
    """Make `folder` contain exactly these files."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
