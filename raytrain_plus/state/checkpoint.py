"""Checkpoints in a run's folder: shares are written, a manifest makes them one, and what is read is checked first.

The order of things is what makes a checkpoint whole or none: every share is durable before the manifest is created,
and old ones go only after that. `state.manifest` says what lies where.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from raytrain_plus.errors import CheckpointError, DamagedError
from raytrain_plus.state import manifest as m
from raytrain_plus.state.shares import Piece
from raytrain_plus.state.tensorfile import header
from raytrain_plus.storage.interface import Folder, Stat

Array = npt.NDArray[Any]
CHUNK = 8 << 20
"""Bytes handed to the storage at once."""
MISSING = "the file is missing"
READERS = 4
"""Pieces read at the same time."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A piece of a tensor, its bytes apart from the live ones."""

    piece: Piece
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    data: Array
    """Bytes, in one dimension."""


def amiss(run: Folder, manifest: m.Manifest) -> str:
    """What of a checkpoint's files is not there, or not whole, seen from here; empty where all are."""
    return _amiss(manifest, run.files(f"{m.FOLDER}/{manifest.name}"))


def _amiss(manifest: m.Manifest, files: Mapping[str, Stat]) -> str:
    for file in manifest.files:
        stat = files.get(f"{m.FOLDER}/{manifest.name}/{file.name}")
        if stat is None:
            return f"{file.name} is missing"
        if stat.bytes != file.bytes:
            return f"{file.name} has {stat.bytes:,} bytes, not {file.bytes:,}"
    return ""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, or what is left of one."""

    name: str
    step: int
    generation: int
    bytes: int
    time: float
    """Of its newest file, in Unix seconds."""
    manifest: m.Manifest | None
    """Where it is complete and counts."""
    why: str
    """Why it does not, otherwise."""
    error: CheckpointError | None = None
    """What reading its manifest raised."""
    damaged: bool = False
    """It was complete once."""


def write_share(
    run: Folder,
    name: str,
    writer: int,
    writers: int,
    copies: Sequence[Copy],
    moved: Callable[[], None] = lambda: None,
) -> m.Share:
    """Writes one writer's share of the checkpoint `name`, durable. Raises `OSError` where that is not possible.

    `moved` is called whenever the storage asks for more.
    """
    head = header([(_label(copy), copy.dtype, _rows(copy), copy.piece.bytes) for copy in copies])
    total = xxhash.xxh3_128()

    def chunks() -> Iterator[memoryview]:
        for part in (memoryview(head), *(copy.data.data for copy in copies)):
            for start in range(0, len(part), CHUNK):
                chunk = part[start : start + CHUNK]
                total.update(chunk)
                moved()
                yield chunk

    file = f"{writer:05d}-of-{writers:05d}.safetensors"
    run.write(f"{m.FOLDER}/{name}/{file}", chunks())
    tensors: dict[str, m.Tensor] = {}
    at = len(head)
    for copy in copies:
        piece = copy.piece
        stored = m.Stored(0, at, piece.bytes, piece.first, piece.last, xxhash.xxh3_128(copy.data.data).hexdigest())
        before = tensors[piece.tensor].pieces if piece.tensor in tensors else ()
        tensors[piece.tensor] = m.Tensor(copy.dtype, copy.shape, (*before, stored))
        at += piece.bytes
    return m.Share(m.File(file, at, total.hexdigest(), len(head), xxhash.xxh3_128(head).hexdigest()), tensors)


def _label(copy: Copy) -> str:
    piece = copy.piece
    whole = piece.bytes == copy.data.nbytes and (piece.first, piece.last) == (0, copy.shape[0] if copy.shape else 1)
    return piece.tensor if whole else f"{piece.tensor}[{piece.first}:{piece.last}]"


def _rows(copy: Copy) -> tuple[int, ...]:
    return (copy.piece.last - copy.piece.first, *copy.shape[1:]) if copy.shape else ()


def commit(run: Folder, manifest: m.Manifest) -> None:
    """Makes a checkpoint of what lies there. Raises `CheckpointError` where there is one of that name already."""
    file, document = f"{m.FOLDER}/{manifest.name}.json", m.to_bytes(manifest)
    # A try that failed after the file had its name is one that succeeded.
    if not run.create(file, document) and run.read(file) != document:
        raise CheckpointError("another controller has written this checkpoint", where=f"{run.where}/{file}")


def survey(run: Folder, resumptions: Iterable[tuple[int, int]] = ()) -> list[Found]:
    """Every checkpoint in a run's folder, newest first, with why it is none where it is none; nothing is hashed."""
    # Of a writer that was killed nothing else may be there.
    files = {**run.files(m.FOLDER), **run.unfinished(m.FOLDER)}
    names = {name for file in files if (name := _name(file)) is not None}
    past = list(resumptions)
    found = [_found(run, name, files, past) for name in names]
    return sorted(found, key=lambda one: (one.generation, one.step), reverse=True)


def _name(file: str) -> str | None:
    """The checkpoint that a file belongs to."""
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
        return nothing("void: the run went on from an earlier one")
    try:
        manifest = m.from_bytes(run.read(document), name)
    except FileNotFoundError:
        return nothing("removed a moment ago")
    except CheckpointError as error:
        return told(None, error.what, error)
    fault = _amiss(manifest, files)
    return told(None, fault) if fault else told(manifest, "")


def discard(run: Folder, name: str) -> None:
    """Removes what was written of a checkpoint that was never made; one that was is left alone.

    Raises `OSError` where something cannot be removed.
    """
    if f"{m.FOLDER}/{name}.json" not in run.files(m.FOLDER):
        run.remove(f"{m.FOLDER}/{name}")


def sweep(run: Folder, stay: Collection[str], before: tuple[int, int]) -> None:
    """Removes every checkpoint, and what is left of one, that is older than `before` (generation, step), but `stay`.

    The manifest goes first: what is half removed is none. Raises `OSError` where something cannot be removed.
    """
    begun = run.unfinished(m.FOLDER)
    names = {name for file in (*run.files(m.FOLDER), *begun) if (name := _name(file)) is not None}
    for name in sorted(names - set(stay)):
        step, generation = m.parse_name(name) or (-1, -1)
        if (generation, step) < before:
            run.remove(f"{m.FOLDER}/{name}.json")
            run.remove(f"{m.FOLDER}/{name}")
    for file in begun:
        # A manifest's, of a controller that was killed: who sweeps makes none at that moment.
        if file.count("/") == 1:
            run.remove(file)


def read_tensors(
    run: Folder, manifest: m.Manifest, wanted: Mapping[str, tuple[int, int] | None]
) -> dict[str, tuple[str, tuple[int, ...], Array]]:
    """Tensors (dtype, shape, bytes) by name, or their rows [first, last); only the pieces that hold these are read.

    Every byte that is read is checked. Raises `DamagedError` where one is not what was written, `OSError` where the
    storage fails.
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
        raise DamagedError(f"the file has been cut to {stat.bytes:,} bytes", where=f"{run.where}/{file}") from None
    if xxhash.xxh3_128(into.data).hexdigest() != expected:
        raise DamagedError(
            f"the file is damaged: bytes {start:,} to {start + into.nbytes:,} are not those that were written",
            where=f"{run.where}/{file}",
        )
