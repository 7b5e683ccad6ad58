"""Implement `Folder` on an object store or a remote file system, through pyarrow: S3, GCS, Azure, HDFS.

    S3 with boto3    write: upload, aborted if it fails                create: conditional put
    all others       write: .name.part is written - moved to name      create: existence check, then write

pyarrow cannot abandon a file: closing its stream, or dropping it, completes the object with the bytes written so far.
An exception half way would therefore replace a whole file by half a file; hence the temporary name. On S3 the move
costs a copy inside the store, which is limited to objects of 5 GB; boto3 avoids the copy and the limit.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs

from raytrain_plus.errors import InputError, StorageError
from raytrain_plus.storage.address import check_name, within
from raytrain_plus.storage.folders.local import PART, LocalFolder
from raytrain_plus.storage.interface import Buffer, Folder, Stat

if TYPE_CHECKING:
    from raytrain_plus.storage.folders.s3 import Objects

OBJECT_STORES = ("s3", "gcs", "abfs")
"""Storage on which a folder is a prefix of names, which cannot be renamed."""
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0
"""Seconds without a byte on S3; the libraries try three times. The clients of other stores have their own limits."""


def open_remote(where: str) -> Folder:
    """Return the folder at an address, such as `s3://bucket/runs?region=eu-west-1`; it need not exist.

    The address can carry pyarrow's settings but no credentials: these come from the environment. Raises `InputError` if
    the address is invalid, `OSError` if its store cannot be reached.
    """
    shown = where.partition("?")[0]
    system, path = open_system(where)
    if system.type_name == "local":
        return LocalFolder(Path(path))
    path = path.rstrip("/")
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in (parts if system.type_name in OBJECT_STORES else parts[1:])):
        raise _no_address(shown, "its path is empty, or has an empty part, '.' or '..'")
    if system.type_name != "s3":
        return RemoteFolder(system, path, where)
    _, (settings,) = system.__reduce__()
    return RemoteFolder(system, path, where, _objects(settings, system.region))


def open_system(where: str) -> tuple[fs.FileSystem, str]:
    """Return the file system that an address names, with the limits of this module, and the address's path in it.

    Raises `InputError` if the address is invalid, `OSError` if its store cannot be reached.
    """
    shown = where.partition("?")[0]
    with _told(f"{shown} could not be opened"):
        try:
            system, path = fs.FileSystem.from_uri(where)
        except (ValueError, NotImplementedError) as error:
            raise _no_address(shown, str(error).replace(where, shown)) from None
    if system.type_name == "s3":
        _, (settings,) = system.__reduce__()
        limits = {"connect_timeout": CONNECT_TIMEOUT_S, "request_timeout": REQUEST_TIMEOUT_S}
        system = fs.S3FileSystem(**{**settings, **limits})
    return system, path


def _no_address(shown: str, why: str) -> InputError:
    return InputError(
        f"this is not a valid address of a folder{f' ({why})' if why else ''}",
        where=shown,
        expected="s3://bucket/path, gs://bucket/path, abfs://container@account.dfs.core.windows.net/path, "
        "hdfs://host:port/path, or a path",
        remedy="correct the address",
    )


def _objects(settings: Mapping[str, Any], region: str) -> Objects | None:
    """Return the S3 operations that pyarrow lacks, or None if boto3 is not installed."""
    try:
        from raytrain_plus.storage.folders.s3 import Objects
    except ModuleNotFoundError:
        return None
    return Objects(settings, region)


class RemoteFolder:
    """See `Folder`; `exclusive` on S3 with boto3.

    An S3-compatible store without conditional writes (AWS has them since 2024) replaces existing objects on `create`:
    `runs.folder.Fence` tests for that.
    """

    path = None

    def __init__(self, system: fs.FileSystem, path: str, address: str, objects: Objects | None = None) -> None:
        """Create the folder object: `path` is its path in `system`, `address` opens it again."""
        self.address = address
        self.where = address.partition("?")[0]
        self.exclusive = objects is not None
        self._system = system
        self._path = path
        self._objects = objects

    def path_of(self, name: str) -> None:
        """Return None: the file is not on a file system of this machine."""

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        """Write a file from its pieces; replaces an existing one."""
        if self._objects is not None:
            self._objects.upload(self._inside(name), data)
        else:
            self._write_beside(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that does not exist yet. Return False if it exists with other bytes, and leave it unchanged.

        An existing file with the same bytes counts as created by this call: the put may have succeeded and its answer
        may be lost, here or in an earlier call. A caller that must be the only one puts random bytes into `data`.
        """
        if self._objects is not None:
            created = self._objects.create(self._inside(name), data)
        else:
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
        """Rename the folder inside its parent; object stores copy it file by file.

        Raises `FileExistsError` if the name is taken.
        """
        parent, slash, _ = self._path.rpartition("/")
        target = f"{parent}/{check_name(to)}"
        if not slash:
            raise OSError(f"{self.where} is a whole bucket and cannot be renamed")
        with self._doing(f"moved to {to}"):
            taken = self._type(target) != fs.FileType.NotFound
        if taken:
            raise FileExistsError(errno.EEXIST, "the name is already taken", to)
        if self._system.type_name not in OBJECT_STORES:
            with self._doing(f"moved to {to}"):
                self._system.move(self._path, target)
            return
        names = self.files()
        if not names:
            raise FileNotFoundError(errno.ENOENT, "folder not found", self.where)
        for name in names:
            self._copy(name, f"{target}/{name}")
        with self._doing("removed after it was copied"):
            self._system.delete_dir(self._path)

    def inside(self, name: str) -> Folder:
        """Return a subfolder; it need not exist."""
        return RemoteFolder(self._system, self._inside(name), within(self.address, name), self._objects)

    def existing(self) -> Folder:
        """Return this folder: object stores have no folders to create."""
        return self

    def _inside(self, name: str) -> str:
        return f"{self._path}/{check_name(name)}"

    def _type(self, path: str) -> fs.FileType:
        return self._system.get_file_info(path).type

    def _copy(self, name: str, target: str) -> None:
        if self._objects is not None:
            self._objects.copy(self._inside(name), target)
        else:
            with self._doing("copied", name):
                self._system.copy_file(self._inside(name), target)

    def _write_beside(self, name: str, data: Iterable[Buffer]) -> None:
        target = self._inside(name)
        folder, _, last = target.rpartition("/")
        part = f"{folder}/.{last}.{secrets.token_hex(4)}{PART}"
        with self._doing("written", name):
            if self._system.type_name not in OBJECT_STORES:
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

    def _doing(self, done: str, name: str = "") -> contextlib.AbstractContextManager[None]:
        return _told(f"{self.where}/{name} could not be {done}" if name else f"{self.where} could not be {done}")


@contextlib.contextmanager
def _told(failure: str) -> Iterator[None]:
    """Turn the errors of pyarrow into a `StorageError` that begins with `failure`.

    The cause is not chained: logs would show its unmodified text, which may contain an address with credentials.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{failure}: it does not exist") from None
    except (OSError, pa.ArrowException) as error:
        why = str(error).partition("\n")[0]
        raise StorageError(f"{failure}: {why}") from None
