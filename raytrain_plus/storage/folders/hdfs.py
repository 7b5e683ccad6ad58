"""Implement `Folder` on HDFS, through pyarrow.

    write     .name.xxxx.part is written - moved to name
    create    existence check, then write

pyarrow cannot abandon a file: closing its stream, or dropping it, completes the file with the bytes written so far.
An exception half way would therefore replace a whole file by half a file; hence the temporary name.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterable, Mapping

import pyarrow as pa
from pyarrow import fs

from raytrain_plus.storage.address import check_name, within
from raytrain_plus.storage.folders.local import PART
from raytrain_plus.storage.interface import Buffer, Folder, Stat
from raytrain_plus.storage.pyarrow_system import told_by_pyarrow


class HdfsFolder:
    """See `Folder`; two concurrent `create` calls of a name may both succeed."""

    path = None
    exclusive = False

    def __init__(self, system: fs.FileSystem, path: str, address: str) -> None:
        """Create the folder object: `path` is its path in `system`, `address` opens it again."""
        self.address = address
        self.where = address.partition("?")[0]
        self._system = system
        self._path = path

    def path_of(self, name: str) -> None:
        """Return None: the file is not on a file system of this machine."""

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        """Write a file from its pieces; replaces an existing one."""
        target = self._inside(name)
        folder, _, last = target.rpartition("/")
        part = f"{folder}/.{last}.{secrets.token_hex(4)}{PART}"
        with self._doing("written", name):
            self._system.create_dir(folder, recursive=True)
            stream = self._system.open_output_stream(part)
        try:
            for piece in data:
                with self._doing("written", name):
                    stream.write(piece)
            with self._doing("written", name):
                stream.close()
                self._system.move(part, target)
        except BaseException:
            # If this fails too, an unlisted file stays behind; the caller must see the first failure.
            for tidy in (stream.close, lambda: self._system.delete_file(part)):
                with contextlib.suppress(OSError, pa.ArrowException):
                    tidy()
            raise

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that does not exist yet. Return False if it exists with other bytes, and leave it unchanged.

        An existing file with the same bytes counts as created by this call: the put may have succeeded and its answer
        may be lost, here or in an earlier call. A caller that must be the only one puts random bytes into `data`.
        """
        with self._doing("created", name):
            created = self._type(self._inside(name)) == fs.FileType.NotFound
        if created:
            self.write(name, [data])
        try:
            return created or self.read(name) == data
        except FileNotFoundError:
            return False

    def read(self, name: str) -> bytes:
        """Return the bytes of a file. Raises `FileNotFoundError` if it does not exist."""
        with self._doing("read", name), self._system.open_input_file(self._inside(name)) as file:
            data: bytes = file.read()
            if len(data) != file.size():
                raise OSError(f"received {len(data)} bytes, expected {file.size()}")
            return data

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `start`. Raises `OSError` if the file is too short."""
        with self._doing("read", name), self._system.open_input_file(self._inside(name)) as file:
            if file.size() < start + len(into):
                raise OSError(f"it ends after {file.size()} bytes; {start + len(into)} are needed")
            file.seek(start)
            done = 0
            while done < len(into):
                count = file.readinto(into[done:])
                if not count:
                    raise OSError(f"received {start + done} bytes, expected {start + len(into)}")
                done += count

    def files(self, under: str = "") -> Mapping[str, Stat]:
        """Return all files under a subfolder, recursively; an empty mapping if it does not exist."""
        return {name: stat for name, stat in self._all(under).items() if not name.endswith(PART)}

    def unfinished(self, under: str = "") -> Mapping[str, Stat]:
        """Return the unfinished files under a subfolder, which a killed writer leaves behind."""
        return {name: stat for name, stat in self._all(under).items() if name.endswith(PART)}

    def _all(self, under: str) -> Mapping[str, Stat]:
        top = self._inside(under) if under else self._path
        with self._doing("listed", under):
            found = self._system.get_file_info(fs.FileSelector(top, recursive=True, allow_not_found=True))
        return {
            info.path[len(self._path) + 1 :]: Stat(info.size, (info.mtime_ns or 0) / 1e9)
            for info in found
            if info.type == fs.FileType.File
        }

    def remove(self, name: str) -> None:
        """Remove a file, or everything under a folder; a missing one is not an error."""
        path = self._inside(name)
        with contextlib.suppress(FileNotFoundError), self._doing("removed", name):
            kind = self._type(path)
            if kind == fs.FileType.Directory:
                self._system.delete_dir(path)
            elif kind != fs.FileType.NotFound:
                self._system.delete_file(path)

    def move(self, to: str) -> None:
        """Rename the folder inside its parent. Raises `FileExistsError` if the name is taken."""
        parent, slash, _ = self._path.rpartition("/")
        target = f"{parent}/{check_name(to)}"
        if not slash:
            raise OSError(f"{self.where} is a whole file system and cannot be renamed")
        with self._doing(f"moved to {to}"):
            taken = self._type(target) != fs.FileType.NotFound
        if taken:
            raise FileExistsError(errno.EEXIST, "the name is already taken", to)
        with self._doing(f"moved to {to}"):
            self._system.move(self._path, target)

    def inside(self, name: str) -> Folder:
        """Return a subfolder; it need not exist."""
        return HdfsFolder(self._system, self._inside(name), within(self.address, name))

    def existing(self) -> Folder:
        """Return this folder: each write creates the folders that it needs."""
        return self

    def _inside(self, name: str) -> str:
        return f"{self._path}/{check_name(name)}"

    def _type(self, path: str) -> fs.FileType:
        return self._system.get_file_info(path).type

    def _doing(self, done: str, name: str = "") -> contextlib.AbstractContextManager[None]:
        return told_by_pyarrow(
            f"{self.where}/{name} could not be {done}" if name else f"{self.where} could not be {done}"
        )
