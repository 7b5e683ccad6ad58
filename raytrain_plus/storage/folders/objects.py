"""Implement `Folder` on an object store, through obstore: S3, Google Cloud Storage and Azure Blob Storage.

write     less than a part: put; more: multipart upload, aborted if it fails before its end
create    put on the condition that the object does not exist: If-None-Match; Google ifGenerationMatch=0
move      every object is copied, then all old ones are removed
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from obstore.exceptions import AlreadyExistsError, BaseError

from raytrain_plus.errors import StorageError
from raytrain_plus.storage.address import check_name, within
from raytrain_plus.storage.folders.local import PART
from raytrain_plus.storage.folders.store_client import SENDERS, StoreClient, refuse_fork, store_reason
from raytrain_plus.storage.interface import Buffer, Folder, Stat

PART_BYTES = 16 << 20
"""Bytes per part of an upload; S3 takes 10,000 parts, so an object has at most 156 GiB."""
CONFLICTS = 10
"""Maximum attempts to create an object that others write or remove at the same moment."""
CONFLICT_WAIT_S = 0.2
COPY_BYTES = 5 << 30
"""Largest object that S3 copies in one request."""
COPY_WAIT_S = 60.0
"""Seconds to wait for copies that Azure completes later."""
READ_BYTES = 8 << 20
"""Bytes of an answer that are collected before they are moved to where they are wanted."""


class _DataFailed(Exception):
    """Carries an error of the data past those of obstore."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _marked(parts: Iterator[bytearray]) -> Iterator[bytearray]:
    try:
        yield from parts
    except Exception as error:
        raise _DataFailed(error) from error


def _parts(data: Iterable[Buffer]) -> Iterator[bytearray]:
    """Yield the same bytes in parts of equal size, except the last."""
    part = bytearray()
    for piece in data:
        rest = memoryview(piece).cast("B")
        while rest:
            count = min(PART_BYTES - len(part), len(rest))
            part += rest[:count]
            rest = rest[count:]
            if len(part) == PART_BYTES:
                yield part
                part = bytearray()
    if part:
        yield part


class ObjectFolder:
    """See `Folder`; `exclusive`.

    An S3-compatible store without conditional writes (AWS has them since 2024) replaces existing objects on `create`:
    `runs.folder.Fence` tests for that.
    """

    path = None
    exclusive = True

    def __init__(self, client: StoreClient, path: str, address: str) -> None:
        """Create the folder object: `path` is what its keys begin with, `address` opens it again."""
        self.address = address
        self.where = address.partition("?")[0]
        self._client = client
        self._store = client.store
        self._path = path

    def path_of(self, name: str) -> None:
        """Return None: the file is not on a file system of this machine."""

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        """Write a file from its pieces, whole or not at all; replaces an existing one.

        The calling thread reads `data`.
        """
        path, parts = self._inside(name), _parts(data)
        first = next(parts, bytearray())
        with self._doing("written", name, changing=True):
            if len(first) < PART_BYTES:
                self._store.put(path, first, use_multipart=False)
                return
            pieces = _marked(itertools.chain([first], parts))
            try:
                self._client.uploads.put(path, pieces, chunk_size=PART_BYTES, max_concurrency=SENDERS)
            except _DataFailed as failed:
                error = failed.error
            else:
                return
        raise error

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that does not exist yet. Return False if it exists with other bytes, and leave it unchanged.

        An existing file with the same bytes counts as created by this call: the put may have succeeded and its answer
        may be lost, here or in an earlier call. A caller that must be the only one puts random bytes into `data`.
        """
        path = self._inside(name)
        for _ in range(CONFLICTS):
            with self._doing("created", name, changing=True), contextlib.suppress(AlreadyExistsError):
                self._store.put(path, data, mode="create")
                return True
            # An object that is not there was removed since, or is being written.
            with contextlib.suppress(FileNotFoundError):
                return self.read(name) == data
            time.sleep(CONFLICT_WAIT_S)
        raise StorageError(
            f"{self.where}/{name} could not be created: {CONFLICTS} attempts conflicted with other writers"
        )

    def read(self, name: str) -> bytes:
        """Return the bytes of a file. Raises `FileNotFoundError` if it does not exist."""
        path = self._inside(name)
        with self._doing("read", name):
            data: bytes = self._store.get(path).bytes().to_bytes()
            return data

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `start`. Raises `OSError` if the file is too short."""
        path, end, done = self._inside(name), start + len(into), 0
        with self._doing("read", name):
            size = self._store.head(path)["size"]
            if size < end:
                raise StorageError(
                    f"{self.where}/{name} could not be read: it ends after {size} bytes; {end} are needed"
                )
            if not into:
                return
            for piece in self._store.get(path, options={"range": (start, end)}).stream(min_chunk_size=READ_BYTES):
                into[done : done + len(piece)] = memoryview(piece)
                done += len(piece)
        if done != len(into):
            raise StorageError(f"{self.where}/{name} could not be read: received {done} bytes, expected {len(into)}")

    def files(self, under: str = "") -> Mapping[str, Stat]:
        """Return all files under a subfolder, recursively; an empty mapping if it does not exist."""
        return {name: stat for name, stat in self._all(under).items() if not name.endswith(PART)}

    def unfinished(self, under: str = "") -> Mapping[str, Stat]:
        """Return the unfinished files under a subfolder, which a killed writer of an earlier version left behind."""
        return {name: stat for name, stat in self._all(under).items() if name.endswith(PART)}

    def _all(self, under: str) -> Mapping[str, Stat]:
        top = self._inside(under) if under else self._path
        with self._doing("listed", under):
            found = [one for batch in self._store.list(top or None) for one in batch if self._is_file(one, top)]
        start = len(self._path) + 1 if self._path else 0
        return {one["path"][start:]: Stat(one["size"], one["last_modified"].timestamp()) for one in found}

    def _is_file(self, listed: Mapping[str, Any], top: str) -> bool:
        """Return whether a listed object is a file: other programs mark folders by empty objects named `folder/`.

        obstore lists those without the slash. pyarrow left them in the runs of earlier versions.
        """
        if listed["size"]:
            return True
        if listed["path"] == top:
            return False
        with contextlib.suppress(FileNotFoundError):
            self._store.head(listed["path"])
            return True
        return False

    def remove(self, name: str) -> None:
        """Remove a file, or everything under a folder; a missing one is not an error."""
        path = self._inside(name)
        with self._doing("removed", name), contextlib.suppress(FileNotFoundError):
            self._store.delete(path)
        if below := [self._inside(one) for one in self._all(name)]:
            with self._doing("removed", name):
                self._delete(below)

    def _delete(self, paths: list[str]) -> None:
        """Remove objects, of which another may have removed some."""
        try:
            self._store.delete(paths)
        except FileNotFoundError:
            # Google and Azure then leave objects after the missing one.
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._store.delete(path)

    def move(self, to: str) -> None:
        """Copy the folder file by file inside its parent, then remove it.

        Raises `FileExistsError` if the name is taken.
        """
        parent, _, last = self._path.rpartition("/")
        check_name(to)
        if not last:
            raise StorageError(f"{self.where} is a whole bucket and cannot be renamed")
        target = ObjectFolder(self._client, f"{parent}/{to}".strip("/"), self.address)
        if target._exists():
            raise FileExistsError(errno.EEXIST, "the name is already taken", to)
        files = self._all("")
        if not files:
            raise FileNotFoundError(errno.ENOENT, "folder not found", self.where)
        for name, stat in files.items():
            self._copy(name, stat.bytes, target)
        self._wait_for_copies(files, target)
        with self._doing("removed after it was copied"):
            self._delete([f"{self._path}/{name}" for name in files])

    def _exists(self) -> bool:
        """Return whether there is an object of this name, or one below it."""
        with contextlib.suppress(FileNotFoundError), self._doing("found"):
            self._store.head(self._path)
            return True
        return bool(self._all(""))

    def _copy(self, name: str, size: int, target: ObjectFolder) -> None:
        with self._doing(f"copied to {target._path}", name):
            if size <= COPY_BYTES:
                self._store.copy(f"{self._path}/{name}", f"{target._path}/{name}")
            else:
                target.write(name, self._store.get(f"{self._path}/{name}").stream(min_chunk_size=READ_BYTES))

    def _wait_for_copies(self, files: Mapping[str, Stat], target: ObjectFolder) -> None:
        """Return once all copies are whole: Azure may answer before that, with an object that is empty until then."""
        deadline = time.monotonic() + COPY_WAIT_S
        while True:
            copies = target._all("")
            if all(name in copies and copies[name].bytes == stat.bytes for name, stat in files.items()):
                return
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{self.where} could not be moved: its copy is not complete after {COPY_WAIT_S:.0f} s"
                )
            time.sleep(1)

    def inside(self, name: str) -> Folder:
        """Return a subfolder; it need not exist."""
        return ObjectFolder(self._client, self._inside(name), within(self.address, name))

    def existing(self) -> Folder:
        """Return this folder: object stores have no folders to create."""
        return self

    def _inside(self, name: str) -> str:
        return f"{self._path}/{check_name(name)}" if self._path else check_name(name)

    @contextlib.contextmanager
    def _doing(self, done: str, name: str = "", *, changing: bool = False) -> Iterator[None]:
        """Turn the errors of obstore into a `StorageError` that says what could not be done.

        `changing`: nothing can be missing but the bucket. The cause is not chained: logs would show its unmodified
        text, which may contain an address with credentials.
        """
        refuse_fork()
        failure = f"{self.where}/{name} could not be {done}" if name else f"{self.where} could not be {done}"
        try:
            yield
        except FileNotFoundError as error:
            if not changing:
                raise FileNotFoundError(f"{failure}: it does not exist") from None
            raise StorageError(f"{failure}: {store_reason(str(error))}") from None
        except BaseError as error:
            raise StorageError(f"{failure}: {store_reason(str(error))}") from None
