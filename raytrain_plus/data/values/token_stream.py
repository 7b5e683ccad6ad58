"""A file of token numbers, one after the other, mapped into memory: NumPy's `.npy`, or the numbers alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from raytrain_plus.errors import DataError, first_line
from raytrain_plus.job.setting_types import Format, Numbers

SUFFIXES = (".bin", ".npy")
OTHERS = (
    ".arrow",
    ".bz2",
    ".csv",
    ".feather",
    ".gz",
    ".jsonl",
    ".npz",
    ".parquet",
    ".pt",
    ".tar",
    ".txt",
    ".zip",
    ".zst",
)
"""How the names of other files end: read as numbers, they would be noise."""
PIECES, PIECE_BYTES = 256, 1 << 16
"""Pieces of a file that its digest is over, which begin at equal distances: all of a file of up to 16 MiB."""


def mapped(file: Path, numbers: Numbers | None) -> npt.NDArray[Any]:
    """Return the numbers in a file of this machine; they are read when they are used.

    `numbers`: their type, which `.npy` says itself. Raises `DataError` if the file holds no stream of whole numbers, or
    numbers of another type.
    """
    try:
        return _npy(file, numbers) if file.suffix.lower() == ".npy" else _flat(file, numbers)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or first_line(error)}", where=str(file)) from error


def _flat(file: Path, numbers: Numbers | None) -> npt.NDArray[Any]:
    if numbers is None:
        raise DataError(
            "the file does not say of which type its numbers are",
            where=str(file),
            expected=f"data.format: one of {', '.join(get_args(Numbers))}",
            remedy="set data.format: uint16 if the `prepare.py` of nanoGPT wrote it",
        )
    if file.suffix.lower() in OTHERS:
        raise DataError(
            f"its name says that it holds more than numbers, and data.format is {numbers}",
            where=str(file),
            expected="a file of numbers alone, such as train.bin, or an array, train.npy",
            remedy="uncompress or convert it; documents become tokens without data.format",
        )
    kind, size = np.dtype(numbers).newbyteorder("<"), file.stat().st_size
    if size % kind.itemsize:
        raise DataError(
            f"its {size:,} bytes are no multiple of {kind.itemsize}, the bytes of a {numbers}",
            where=str(file),
            remedy="set data.format to the type with which it was written, or write it again",
        )
    # An empty file cannot be mapped.
    return np.asarray(np.memmap(file, kind, mode="r")) if size else np.empty(0, kind)


def _npy(file: Path, numbers: Numbers | None) -> npt.NDArray[Any]:
    try:
        found = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise DataError(f"is no array that NumPy can map: {first_line(error)}", where=str(file)) from error
    if found.dtype.name not in get_args(Numbers):
        raise DataError(
            f"holds {found.dtype.name}, and the numbers of tokens are whole",
            where=str(file),
            expected=f"an array of {', '.join(get_args(Numbers))}",
        )
    if found.ndim != 1:
        raise DataError(
            f"holds an array of the shape {found.shape}, and a stream has one dimension",
            where=str(file),
            remedy="save its .reshape(-1), if its rows are one text",
        )
    if numbers not in (None, found.dtype.name):
        raise DataError(
            f"holds {found.dtype.name}, and data.format is {numbers}",
            where=str(file),
            remedy="leave out data.format: the file says it",
        )
    return found


def numbers_of(form: Format | None) -> Numbers | None:
    """Return the type of numbers that `data.format` names; None if it is not given."""
    return next((one for one in get_args(Numbers) if one == form), None)


def digest_of(file: Path) -> str:
    """Return SHA-256 over pieces of a file, and its size. Raises `OSError` if it cannot be read."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        digest.update(f"{size}\0".encode())
        for number in range(PIECES):
            # The last piece ends with the file.
            begin = max(0, size - PIECE_BYTES) * number // (PIECES - 1)
            opened.seek(begin)
            digest.update(opened.read(PIECE_BYTES))
    return digest.hexdigest()
