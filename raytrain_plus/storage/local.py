"""A folder on a file system: written beside, made durable, and only then named.

    write:   .name.part written - fsync - renamed to name - fsync of the folder
    create:  the same, but linked: a link fails where the name is there, a rename would replace it
             where there are no links (FAT, some network file systems): opened as a new file, and written in place

A file whose fsync failed is thrown away and never synced again: a second fsync can say yes to lost pages
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

PART = ".part"
"""How the name of an unfinished file ends; such files are no part of a folder."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system says that has no hard links."""


class Disk:
    """The calls through which everything reaches the disk, so that a test can stop after any of them."""

    def mkdir(self, folder: Path) -> None:
        """Makes a folder whose parent is there."""
        folder.mkdir(exist_ok=True)

    def open(self, path: Path) -> int:
        """A new, empty file, for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, file: int, data: memoryview) -> int:
        """Writes some of `data`; how many bytes."""
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        """Makes a file's bytes durable."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Closes a file."""
        os.close(file)

    def rename(self, path: Path, to: Path) -> None:
        """Gives a file another name, in place of another file."""
        path.replace(to)

    def link(self, path: Path, to: Path) -> None:
        """Gives a file a second name. Raises `FileExistsError` where there is one of that name."""
        os.link(path, to)

    def unlink(self, path: Path) -> None:
        """Takes a name away."""
        path.unlink(missing_ok=True)

    def rmtree(self, folder: Path) -> None:
        """Removes a folder and everything in it."""
        shutil.rmtree(folder)

    def fsync_folder(self, folder: Path) -> None:
        """Makes a folder's names durable."""
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Every failure of the system's as an error of ours; one that names no file - a full disk's - names this one."""
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

    def __init__(self, path: Path, disk: Disk | None = None, made: Path | None = None) -> None:
        """`made`: this folder or one above it that is there already, and that no write makes again."""
        self.path = path
        self.where = self.address = str(path)
        self._disk = disk or Disk()
        self._made = made

    def path_of(self, name: str) -> Path:
        """Where a file lies, there or not. Raises `InputError` where a link leads out of the folder."""
        return self._inside(name)

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        """Writes a file out of its pieces, in place of an earlier one."""
        target = self._inside(name)
        with naming(target), self._unfinished(target, data) as part:
            self._disk.rename(part, target)
            self._disk.fsync_folder(target.parent)

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file that is not there yet; whether it was not."""
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
            # Also of one that is there: who made it may not have come so far.
            self._disk.fsync_folder(target.parent)
            return made

    def read(self, name: str) -> bytes:
        """A whole file. Raises `FileNotFoundError` where it is not there."""
        path = self._inside(name)
        with naming(path):
            try:
                return path.read_bytes()
            except NotADirectoryError as error:
                raise FileNotFoundError(errno.ENOENT, "a folder above it is a file", str(path)) from error

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Fills `into` with a file's bytes from `start` on. Raises `OSError` where the file is shorter."""
        path = self._inside(name)
        with naming(path):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(into):
                    count = os.preadv(file, [into[done:]], start + done)
                    if not count:
                        raise OSError(f"{path} ends after {start + done} bytes, before {start + len(into)}")
                    done += count
            finally:
                os.close(file)

    def files(self, under: str = "") -> Mapping[str, Stat]:
        """What lies under a folder of this one, however deep; nothing where there is no such folder."""
        return {name: stat for name, stat in self._all(under).items() if not name.endswith(PART)}

    def unfinished(self, under: str = "") -> Mapping[str, Stat]:
        """The same for files that were begun and are none yet: those of a writer that was killed stay."""
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
        """Removes a file, or everything under a folder; what is not there is no error."""
        path = self._inside(name)
        with naming(path):
            if path.is_dir() and not path.is_symlink():
                self._disk.rmtree(path)
            else:
                self._disk.unlink(path)

    def move(self, to: str) -> None:
        """Gives the folder another name beside the one that it has. Raises `FileExistsError` where that is taken."""
        target = self.path.with_name(check_name(to))
        if target.exists():
            raise FileExistsError(errno.EEXIST, "there is something of that name already", to)
        with naming(self.path):
            self.path.rename(target)

    def inside(self, name: str) -> Folder:
        """A folder of this one; it need not be there."""
        return LocalFolder(self._inside(name), self._disk, self._made)

    def existing(self) -> Folder:
        """This folder, which no write makes again: `FileNotFoundError` is raised if it is gone."""
        same = copy.copy(self)
        same._made = self.path
        return same

    def _inside(self, name: str) -> Path:
        """Where a file lies. Raises `InputError` where a link leads out of the folder."""
        path = self.path / check_name(name)
        # `Path.resolve` has an error of its own for links that go round in circles.
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.path)):
            raise InputError(
                f"a link leads out of {self.path}", where=str(path), remedy="put what it leads to in its place"
            )
        return path

    def _make(self, folder: Path) -> None:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        if self._made in missing:
            raise FileNotFoundError(errno.ENOENT, "the folder is gone", str(self._made))
        for one in reversed(missing):
            self._disk.mkdir(one)
            self._disk.fsync_folder(one.parent)

    @contextlib.contextmanager
    def _unfinished(self, target: Path, data: Iterable[Buffer]) -> Iterator[Path]:
        """A durable file of another name; gone afterwards."""
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
        """Writes a new file, makes it durable, and closes it."""
        try:
            for piece in data:
                rest = memoryview(piece).cast("B")
                while rest:
                    rest = rest[self._disk.write(file, rest) :]
            self._disk.fsync(file)
        finally:
            self._disk.close(file)

    def _created_in_place(self, target: Path, data: Buffer) -> bool:
        """Writes a file that is not there yet; whether it was not. Where the machine stops it is there, but not whole:
        a manifest says by its hash that it is not, and of a claim the name is what counts."""
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
