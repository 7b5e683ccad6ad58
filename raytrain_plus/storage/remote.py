"""A folder on an object store or a remote file system, through pyarrow: S3, GCS, Azure, HDFS.

    S3 with boto3    write: uploaded, and aborted where that fails     create: put where there is none
    all others       write: .name.part written - moved to name         create: looked for, then written

pyarrow has no way to give a file up: closing its stream completes the object with what was written so far, and so does
letting the stream go. An exception half way would therefore put half a file in place of a whole one; hence the other
name. On S3 that costs a copy inside the store, which takes objects of 5 GB at most; boto3 spares both.
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
from raytrain_plus.storage.interface import Buffer, Folder, Stat
from raytrain_plus.storage.local import PART, LocalFolder

if TYPE_CHECKING:
    from raytrain_plus.storage.s3 import Objects

OBJECT_STORES = ("s3", "gcs", "abfs")
"""Where a folder is the beginning of a name, which no rename can change."""
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0
"""Without a byte, on S3; the libraries try three times. The clients of the other stores have limits of their own."""


def open_remote(where: str) -> Folder:
    """The folder at an address, such as `s3://bucket/runs?region=eu-west-1`; it need not be there.

    The address holds settings as pyarrow takes them, and no credentials: these come from the environment. Raises
    `InputError` where it is none, `OSError` where the store that it names cannot be asked.
    """
    shown = where.partition("?")[0]
    with _told(f"{shown} could not be opened"):
        try:
            system, path = fs.FileSystem.from_uri(where)
        except (ValueError, NotImplementedError) as error:
            raise _no_address(shown, str(error).replace(where, shown)) from None
    if system.type_name == "local":
        return LocalFolder(Path(path))
    path = path.rstrip("/")
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in (parts if system.type_name in OBJECT_STORES else parts[1:])):
        raise _no_address(shown, "its path is empty, or has an empty part, '.' or '..'")
    if system.type_name != "s3":
        return RemoteFolder(system, path, where)
    _, (settings,) = system.__reduce__()
    limits = {"connect_timeout": CONNECT_TIMEOUT_S, "request_timeout": REQUEST_TIMEOUT_S}
    system = fs.S3FileSystem(**{**settings, **limits})
    return RemoteFolder(system, path, where, _objects({**settings, **limits}, system.region))


def _no_address(shown: str, why: str) -> InputError:
    return InputError(
        f"this is no address of a folder{f' ({why})' if why else ''}",
        where=shown,
        expected="s3://bucket/path, gs://bucket/path, abfs://container@account.dfs.core.windows.net/path, "
        "hdfs://host:port/path, or a path",
        remedy="correct the address",
    )


def _objects(settings: Mapping[str, Any], region: str) -> Objects | None:
    """What S3 offers beyond pyarrow, where boto3 is installed."""
    try:
        from raytrain_plus.storage.s3 import Objects
    except ModuleNotFoundError:
        return None
    return Objects(settings, region)


class RemoteFolder:
    """See `Folder`; `exclusive` on S3 with boto3.

    A store that speaks S3 but does not know conditional writes creates without looking (AWS has them since 2024):
    `runfolder.Fence` tries it out.
    """

    path = None

    def __init__(self, system: fs.FileSystem, path: str, address: str, objects: Objects | None = None) -> None:
        """`path` is the folder's in `system`, `address` what one opens it by."""
        self.address = address
        self.where = address.partition("?")[0]
        self.exclusive = objects is not None
        self._system = system
        self._path = path
        self._objects = objects

    def path_of(self, name: str) -> None:
        """On none of this machine's file systems."""

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        """Writes a file out of its pieces, in place of an earlier one."""
        if self._objects is not None:
            self._objects.upload(self._inside(name), data)
        else:
            self._write_beside(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file that is not there yet; whether it was not.

        Where the same bytes are there already they count as ours: the put was done and its answer lost, here or in an
        earlier call. So whoever must be the only one puts something random into `data`.
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
        """A whole file. Raises `FileNotFoundError` where it is not there."""
        with self._doing("read", name), self._system.open_input_file(self._inside(name)) as file:
            data: bytes = file.read()
            if len(data) != file.size():
                raise OSError(f"{len(data)} bytes came, not {file.size()}")
            return data

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Fills `into` with a file's bytes from `start` on. Raises `OSError` where the file is shorter."""
        with self._doing("read", name), self._system.open_input_file(self._inside(name)) as file:
            if file.size() < start + len(into):
                raise OSError(f"it ends after {file.size()} bytes, before {start + len(into)}")
            file.seek(start)
            done = 0
            while done < len(into):
                count = file.readinto(into[done:])
                if not count:
                    raise OSError(f"{start + done} bytes came, not {start + len(into)}")
                done += count

    def files(self, under: str = "") -> Mapping[str, Stat]:
        """What lies under a folder of this one, however deep; nothing where there is no such folder."""
        return {name: stat for name, stat in self._all(under).items() if not name.endswith(PART)}

    def unfinished(self, under: str = "") -> Mapping[str, Stat]:
        """The same for files that were begun and are none yet: those of a writer that was killed stay."""
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
        """Removes a file, or everything under a folder; what is not there is no error."""
        path = self._inside(name)
        with contextlib.suppress(FileNotFoundError), self._doing("removed", name):
            kind = self._type(path)
            if kind == fs.FileType.Directory:
                self._system.delete_dir(path)
            elif kind != fs.FileType.NotFound:
                self._system.delete_file(path)

    def move(self, to: str) -> None:
        """Gives the folder another name beside the one that it has; on object stores file by file, by copies.

        Raises `FileExistsError` where that is taken.
        """
        parent, slash, _ = self._path.rpartition("/")
        target = f"{parent}/{check_name(to)}"
        if not slash:
            raise OSError(f"{self.where} is a whole bucket, which keeps its name")
        with self._doing(f"moved to {to}"):
            taken = self._type(target) != fs.FileType.NotFound
        if taken:
            raise FileExistsError(errno.EEXIST, "there is something of that name already", to)
        if self._system.type_name not in OBJECT_STORES:
            with self._doing(f"moved to {to}"):
                self._system.move(self._path, target)
            return
        names = self.files()
        if not names:
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", self.where)
        for name in names:
            self._copy(name, f"{target}/{name}")
        with self._doing("removed after it was copied"):
            self._system.delete_dir(self._path)

    def inside(self, name: str) -> Folder:
        """A folder of this one; it need not be there."""
        return RemoteFolder(self._system, self._inside(name), within(self.address, name), self._objects)

    def existing(self) -> Folder:
        """The same: where folders are the beginnings of names, there is none to make."""
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
            # What stays where this fails, too, is a file that nobody sees; the caller has to see the first failure.
            for tidy in (stream.close, lambda: self._system.delete_file(part)):
                with contextlib.suppress(OSError, pa.ArrowException):
                    tidy()
            raise

    def _doing(self, done: str, name: str = "") -> contextlib.AbstractContextManager[None]:
        return _told(f"{self.where}/{name} could not be {done}" if name else f"{self.where} could not be {done}")


@contextlib.contextmanager
def _told(failure: str) -> Iterator[None]:
    """Every failure of pyarrow's as an error of ours that says what could not be done.

    The cause is not chained: logs would show its text, which may repeat an address with credentials, as it is.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{failure}: it is not there") from None
    except (OSError, pa.ArrowException) as error:
        why = str(error).partition("\n")[0]
        raise StorageError(f"{failure}: {why}") from None
