"""Implement `Folder` on a file system: files are written under another name, made durable, and only then named.

    write:   .name.part is written - fsync - rename to name - fsync of the folder
    create:  the same, but with a hard link, which fails if the name exists; a rename would replace it
             without hard links (FAT, some network file systems): opened as a new file and written in place

A file whose fsync failed is discarded and never synced again: a second fsync can succeed although pages are lost
(Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020).
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from stat import S_ISLNK

from raytrain_plus.errors import InputError, StorageError
from raytrain_plus.storage.address import check_name
from raytrain_plus.storage.interface import Buffer, Folder, Stat

SYNC_BYTES = 32 << 20
"""Bytes of a file between two fsyncs. Otherwise a large file is in memory at once, and nobody sees the disk take it."""
PART = ".part"
"""Suffix of unfinished files, which are not listed as files of a folder."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers of file systems without hard links."""


class Disk:
    """The calls that change the disk, gathered here so that a test can stop after any of them."""

    def mkdir(self, folder: Path) -> None:
        """Create a folder whose parent exists."""
        folder.mkdir(exist_ok=True)

    def open(self, path: Path) -> int:
        """Open a new, empty file for writing; return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, file: int, data: memoryview) -> int:
        """Write a part of `data`; return the number of bytes written."""
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        """Make the bytes of a file durable."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def rename(self, path: Path, to: Path) -> None:
        """Rename a file; replaces an existing file."""
        path.replace(to)

    def link(self, path: Path, to: Path) -> None:
        """Create a hard link `to` a file. Raises `FileExistsError` if the name exists."""
        os.link(path, to)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink(missing_ok=True)

    def rmtree(self, folder: Path) -> None:
        """Remove a folder and everything in it."""
        shutil.rmtree(folder)

    def fsync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn `OSError` into `StorageError`; an error that names no file, as of a full disk, gets `path`."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno is None:
            raise
        raise StorageError(error.errno, error.strerror, str(error.filename or path)) from error


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


class LocalFolder:
    """See `Folder`."""

    exclusive = True

    def __init__(self, path: Path, disk: Disk | None = None, must_exist: Path | None = None) -> None:
        """Create the folder object. `must_exist`: this folder or a parent, which exists and no write creates again."""
        self.path = path
        self.where = self.address = str(path)
        self._disk = disk or Disk()
        self.must_exist = must_exist

    def path_of(self, name: str) -> Path:
        """Return the path of a file, existing or not. Raises `InputError` if a link points outside the folder."""
        return self._inside(name)

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        """Write a file from its pieces; replaces an existing one."""
        target = self._inside(name)
        with naming(target), self._unfinished(target, data) as part:
            self._disk.rename(part, target)
            self._disk.fsync_folder(target.parent)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that does not exist yet. Return False if it exists, and leave it unchanged."""
        target = self._inside(name)
        with naming(target), self._unfinished(target, [data]) as part:
            try:
                self._disk.link(part, target)
                made = True
            except FileExistsError:
                made = False
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                made = self._created_in_place(target, data)
            # Also for an existing file: its creator may have stopped before this.
            self._disk.fsync_folder(target.parent)
            return made

    def read(self, name: str) -> bytes:
        """Return the bytes of a file. Raises `FileNotFoundError` if it does not exist."""
        path = self._inside(name)
        with naming(path):
            try:
                return path.read_bytes()
            except NotADirectoryError as error:
                raise FileNotFoundError(errno.ENOENT, "a parent folder is a file", str(path)) from error

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `start`. Raises `OSError` if the file is too short."""
        path = self._inside(name)
        with naming(path):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(into):
                    count = os.preadv(file, [into[done:]], start + done)
                    if not count:
                        raise OSError(f"{path} ends after {start + done} bytes; {start + len(into)} are needed")
                    done += count
            finally:
                os.close(file)

    def files(self, under: str = "") -> Mapping[str, Stat]:
        """Return all files under a subfolder, recursively; an empty mapping if it does not exist."""
        return {name: stat for name, stat in self._all(under).items() if not name.endswith(PART)}

    def unfinished(self, under: str = "") -> Mapping[str, Stat]:
        """Return the unfinished files under a subfolder, which a killed writer leaves behind."""
        return {name: stat for name, stat in self._all(under).items() if name.endswith(PART)}

    def _all(self, under: str) -> Mapping[str, Stat]:
        top = self._inside(under) if under else self.path
        found = {}
        with naming(top):
            for folder, _, names in os.walk(top, onerror=_unless_missing):
                for name in names:
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        stat = path.lstat()
                        if not S_ISLNK(stat.st_mode):
                            found[path.relative_to(self.path).as_posix()] = Stat(stat.st_size, stat.st_mtime)
        return found

    def remove(self, name: str) -> None:
        """Remove a file, or everything under a folder; a missing one is not an error."""
        path = self._inside(name)
        with naming(path):
            if path.is_dir() and not path.is_symlink():
                self._disk.rmtree(path)
            else:
                self._disk.unlink(path)

    def move(self, to: str) -> None:
        """Rename the folder inside its parent. Raises `FileExistsError` if the name is taken."""
        target = self.path.with_name(check_name(to))
        if target.exists():
            raise FileExistsError(errno.EEXIST, "the name is already taken", to)
        with naming(self.path):
            self.path.rename(target)

    def inside(self, name: str) -> Folder:
        """Return a subfolder; it need not exist."""
        return LocalFolder(self._inside(name), self._disk, self.must_exist)

    def existing(self) -> Folder:
        """Return this folder, but one that writes do not create: they raise `FileNotFoundError` if it is gone."""
        same = copy.copy(self)
        same.must_exist = self.path
        return same

    def _inside(self, name: str) -> Path:
        """Return the path of a file. Raises `InputError` if a link points outside the folder."""
        path = self.path / check_name(name)
        # `Path.resolve` raises an error of its own for circular links.
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.path)):
            raise InputError(
                f"a link points outside {self.path}", where=str(path), remedy="replace the link with its target"
            )
        return path

    def _make(self, folder: Path) -> None:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        if self.must_exist in missing:
            raise FileNotFoundError(errno.ENOENT, "the folder is gone", str(self.must_exist))
        for one in reversed(missing):
            self._disk.mkdir(one)
            self._disk.fsync_folder(one.parent)

    @contextlib.contextmanager
    def _unfinished(self, target: Path, data: Iterable[Buffer]) -> Iterator[Path]:
        """Yield the path of a durable file with another name, and remove it afterwards."""
        self._make(target.parent)
        disk, part = self._disk, target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART}")
        file = disk.open(part)
        try:
            self._fill(file, data)
            yield part
        finally:
            with contextlib.suppress(OSError):
                disk.unlink(part)

    def _fill(self, file: int, data: Iterable[Buffer]) -> None:
        """Write a new file, make it durable, and close it."""
        try:
            unsynced = 0
            for piece in data:
                rest = memoryview(piece).cast("B")
                while rest:
                    if unsynced >= SYNC_BYTES:
                        self._disk.fsync(file)
                        unsynced = 0
                    count = self._disk.write(file, rest[:SYNC_BYTES])
                    rest, unsynced = rest[count:], unsynced + count
            self._disk.fsync(file)
        finally:
            self._disk.close(file)

    def _created_in_place(self, target: Path, data: Buffer) -> bool:
        """Create a file without a hard link; return False if it exists.

        If the machine stops meanwhile, the file exists but is not whole. A manifest's hash shows that; of a claim only
        the name matters.
        """
        try:
            file = self._disk.open(target)
        except FileExistsError:
            return False
        try:
            self._fill(file, [data])
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.unlink(target)
            raise
        return True
