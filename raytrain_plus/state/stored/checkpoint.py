"""Write, commit, list, remove and read the checkpoints in a run's folder.

Each writer writes a share; the manifest makes the shares a checkpoint. The order keeps checkpoints atomic: every share
is durable before the manifest is created, and old checkpoints are removed only after that. Every byte read is verified.
`state.stored.manifest` describes the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from raytrain_plus.errors import CheckpointError, DamagedError
from raytrain_plus.membership.pieces import Piece
from raytrain_plus.state.stored import manifest as m
from raytrain_plus.state.stored.tensorfile import header
from raytrain_plus.storage.interface import Buffer, Folder, Stat

Array = npt.NDArray[Any]
CHUNK = 8 << 20
"""Maximum bytes handed to the storage at once."""
MISSING = "the file is missing"
READERS = 4
"""Maximum pieces read at the same time."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A piece of a tensor, copied from the live one."""

    piece: Piece
    """Rows of the tensor's first dimension; [0, 1) of a scalar."""
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    data: Array
    """The piece's bytes, in one dimension."""


def find_checkpoint_fault(run: Folder, manifest: m.Manifest) -> str:
    """Describe the first file of a checkpoint that is missing or incomplete, as seen from here; empty if none is."""
    return _fault_among(manifest, run.files(f"{m.FOLDER}/{manifest.name}"))


def _fault_among(manifest: m.Manifest, files: Mapping[str, Stat]) -> str:
    for file in manifest.files:
        stat = files.get(f"{m.FOLDER}/{manifest.name}/{file.name}")
        if stat is None:
            return f"{file.name} is missing"
        if stat.bytes != file.bytes:
            return f"{file.name} has {stat.bytes:,} bytes, expected {file.bytes:,}"
    return ""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, or the remains of one."""

    name: str
    step: int
    generation: int
    bytes: int
    time: float
    """The time of its newest file, in Unix seconds."""
    manifest: m.Manifest | None
    """Its manifest if it is complete and valid, else None."""
    why: str
    """The reason why it is not complete or valid; empty if it is."""
    error: CheckpointError | None = None
    """The error of reading its manifest, if any."""
    damaged: bool = False
    """Whether it was complete once and is damaged now."""


def write_share(
    run: Folder,
    name: str,
    writer: int,
    writers: int,
    copies: Sequence[Copy],
    moved: Callable[[int], None] = lambda done: None,
) -> m.Share:
    """Write one writer's share of the checkpoint `name` durably, and return its description for the manifest.

    `moved` gets the number of bytes that the storage has taken, whenever it asks for more. Raises `OSError` if the
    share cannot be written.
    """
    head = header([(_label(copy), copy.dtype, _rows(copy), copy.data.nbytes) for copy in copies])
    total = xxhash.xxh3_128()
    done = 0

    def chunks() -> Iterator[memoryview]:
        nonlocal done
        for part in (memoryview(head), *(copy.data.data for copy in copies)):
            for chunk in chunked(part):
                total.update(chunk)
                moved(done)
                yield chunk
                done += len(chunk)

    file = f"{writer:05d}-of-{writers:05d}.safetensors"
    run.write(f"{m.FOLDER}/{name}/{file}", chunks())
    tensors: dict[str, m.StoredTensor] = {}
    at = len(head)
    for copy in copies:
        name, first, last = copy.piece
        stored = m.Stored(0, at, copy.data.nbytes, first, last, xxhash.xxh3_128(copy.data.data).hexdigest())
        before = tensors[name].pieces if name in tensors else ()
        tensors[name] = m.StoredTensor(copy.dtype, copy.shape, (*before, stored))
        at += copy.data.nbytes
    return m.Share(m.File(file, at, total.hexdigest(), len(head), xxhash.xxh3_128(head).hexdigest()), tensors)


def chunked(data: Buffer) -> Iterator[memoryview]:
    """Yield bytes in chunks of at most `CHUNK`."""
    view = memoryview(data).cast("B")
    return (view[start : start + CHUNK] for start in range(0, len(view), CHUNK))


def _label(copy: Copy) -> str:
    name, first, last = copy.piece
    whole = (first, last) == (0, copy.shape[0] if copy.shape else 1)
    return name if whole else f"{name}[{first}:{last}]"


def _rows(copy: Copy) -> tuple[int, ...]:
    return (copy.piece.last - copy.piece.first, *copy.shape[1:]) if copy.shape else ()


def commit(run: Folder, manifest: m.Manifest) -> None:
    """Commit a checkpoint whose shares are written, by creating its manifest.

    Raises `CheckpointError` if another controller has committed one of that name.
    """
    file, document = f"{m.FOLDER}/{manifest.name}.json", m.manifest_bytes(manifest)
    # An attempt that failed after the file had its name did succeed: the content is then the same.
    if not run.create(file, document) and run.read(file) != document:
        raise CheckpointError("another controller has written this checkpoint", where=f"{run.where}/{file}")


def survey(run: Folder, resumptions: Iterable[tuple[int, int]] = ()) -> list[Found]:
    """List every checkpoint in a run's folder, newest first, with the reason if it is unusable. Hashes no files.

    One that lacks tensors that others have is unusable. `resumptions`: (generation, step) of each resumption.
    """
    # A killed writer may have left nothing but unfinished files.
    files = {**run.files(m.FOLDER), **run.unfinished(m.FOLDER)}
    names = {name for file in files if (name := _name(file)) is not None}
    past = list(resumptions)
    found = [_found(run, name, files, past) for name in names]
    lacking = m.lacks([one.manifest for one in found if one.manifest is not None])
    found = [_incomplete(one, lacking[one.name]) if one.name in lacking else one for one in found]
    return sorted(found, key=lambda one: (one.step, one.generation), reverse=True)


def _incomplete(found: Found, lacking: str) -> Found:
    return replace(found, manifest=None, why=f"incomplete: {lacking}", damaged=True)


def _name(file: str) -> str | None:
    """Return the name of the checkpoint that a file belongs to, if any."""
    part = file.split("/")[1].removesuffix(".json")
    return part if m.parse_name(part) else None


def _found(run: Folder, name: str, files: Mapping[str, Stat], past: Iterable[tuple[int, int]]) -> Found:
    step, generation = m.parse_name(name) or (-1, -1)
    mine = {file: stat for file, stat in files.items() if _name(file) == name}
    size, time = sum(stat.bytes for stat in mine.values()), max(stat.time for stat in mine.values())

    def told(manifest: m.Manifest | None, why: str, error: CheckpointError | None = None) -> Found:
        damaged = manifest is None and (error is None or isinstance(error, DamagedError))
        return Found(name, step, generation, size, time, manifest, why, error, damaged)

    def nothing(why: str) -> Found:
        return Found(name, step, generation, size, time, None, why)

    document = f"{m.FOLDER}/{name}.json"
    if document not in files:
        return nothing("not finished: there is no manifest")
    if m.void(name, past):
        return nothing("void: the run resumed from an earlier checkpoint")
    try:
        manifest = m.parse_manifest(run.read(document), name)
    except FileNotFoundError:
        return nothing("removed a moment ago")
    except CheckpointError as error:
        return told(None, error.what, error)
    fault = _fault_among(manifest, files)
    return told(None, fault) if fault else told(manifest, "")


def discard(run: Folder, name: str) -> None:
    """Remove the shares of a checkpoint that was never committed; a committed one is left alone.

    Raises `OSError` if something cannot be removed.
    """
    if f"{m.FOLDER}/{name}.json" not in run.files(m.FOLDER):
        run.remove(f"{m.FOLDER}/{name}")


def sweep(run: Folder, stay: Collection[str], made: m.Manifest) -> None:
    """Remove every checkpoint, complete or not, that was begun before the one just made, except those in `stay`.

    The manifest is removed first, so that a half-removed checkpoint does not count. Raises `OSError` if something
    cannot be removed.
    """
    begun = run.unfinished(m.FOLDER)
    names = {name for file in (*run.files(m.FOLDER), *begun) if (name := _name(file)) is not None}
    for name in sorted(names - set(stay)):
        step, generation = m.parse_name(name) or (-1, -1)
        if (generation, step) < (made.generation, made.step):
            run.remove(f"{m.FOLDER}/{name}.json")
            run.remove(f"{m.FOLDER}/{name}")
    for file in begun:
        # An unfinished manifest of a killed controller: the caller is not writing one at this moment.
        if file.count("/") == 1:
            run.remove(file)


def read_tensors(
    run: Folder, manifest: m.Manifest, wanted: Mapping[str, tuple[int, int] | None]
) -> dict[str, tuple[str, tuple[int, ...], Array]]:
    """Return tensors (dtype, shape, bytes) by name, whole (None) or their rows [first, last).

    Reads only the pieces that hold the wanted rows, and verifies every byte that it reads. Raises `DamagedError` if a
    byte differs from what was written, `OSError` if the storage fails.
    """
    place = f"{m.FOLDER}/{manifest.name}"
    whole: dict[str, tuple[str, tuple[int, ...], Array]] = {}
    reads: list[tuple[m.Stored, Array, slice | None]] = []
    for name, rows in wanted.items():
        tensor = manifest.tensors[name]
        count = tensor.shape[0] if tensor.shape else 1
        first, last = rows if rows is not None else (0, count)
        row_bytes = tensor.bytes // count if count else 0
        into = np.empty((last - first) * row_bytes, np.uint8)
        shape = (last - first, *tensor.shape[1:]) if tensor.shape else ()
        whole[name] = (tensor.dtype, shape, into)
        for piece in tensor.pieces:
            low, high = max(first, piece.first), min(last, piece.last)
            if low < high and row_bytes:
                target = into[(low - first) * row_bytes : (high - first) * row_bytes]
                skip = (low - piece.first) * row_bytes
                part = None if target.nbytes == piece.bytes else slice(skip, skip + target.nbytes)
                reads.append((piece, target, part))

    def read(one: tuple[m.Stored, Array, slice | None]) -> None:
        piece, target, part = one
        file = manifest.files[piece.file]
        data = target if part is None else np.empty(piece.bytes, np.uint8)
        _read(run, f"{place}/{file.name}", piece.start, data, piece.xxh3_128)
        if part is not None:
            target[:] = data[part]

    def read_head(number: int) -> None:
        file = manifest.files[number]
        _read(run, f"{place}/{file.name}", 0, np.empty(file.head, np.uint8), file.head_xxh3_128)

    with ThreadPoolExecutor(READERS, thread_name_prefix="read") as pool:
        heads = pool.map(read_head, sorted({piece.file for piece, _, _ in reads}))
        for _ in (*pool.map(read, reads), *heads):
            continue
    return whole


def _read(run: Folder, file: str, start: int, into: Array, expected: str) -> None:
    try:
        run.read_into(file, start, into.data)
    except FileNotFoundError:
        raise DamagedError(MISSING, where=f"{run.where}/{file}") from None
    except OSError:
        stat = run.files(file.rpartition("/")[0]).get(file)
        if stat is None or stat.bytes >= start + into.nbytes:
            raise
        raise DamagedError(f"the file is truncated to {stat.bytes:,} bytes", where=f"{run.where}/{file}") from None
    if xxhash.xxh3_128(into.data).hexdigest() != expected:
        raise DamagedError(
            f"the file is damaged: bytes {start:,} to {start + into.nbytes:,} do not match their checksum",
            where=f"{run.where}/{file}",
        )
