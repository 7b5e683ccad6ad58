"""The header: what all workers must know of a step besides its gradients, as one int64 vector summed once per step.

    shard 0                              shard 1 ...   flags
    start | rows | ids | weight | loss                 pause | save | ...     (`data.ledger.NOTE`, `Flags`)

Each shard's slots have one writer; every other worker adds zero. So the sum passes the writer's bits to all workers
unchanged. Every worker computes the same loss, in shard order, independent of the ring.

The header travels at the end of the first gradient bucket: a separate sum, however small, costs one more round of
agreement per step on what to sum. A floating-point bucket sums whole numbers exactly while they fit its significant
bits, so the header is sent as digits that do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raytrain_plus.data.ledger import NOTE

_SLOTS = NOTE.itemsize // 8
_DIGIT_BITS = {"float64": 32, "float32": 16}


class ShardReport(NamedTuple):
    """One shard's report on its part of a step, as in `data.ledger.NOTE`."""

    start: int
    rows: int = 0
    ids: int = 0
    weight: float = 0.0
    loss: float = 0.0

    def plus(self, rows: int, ids: int, weight: float, loss: float) -> ShardReport:
        """Return the report with one more microbatch of that mean loss and weight."""
        return ShardReport(
            self.start, self.rows + rows, (self.ids + ids) % 2**64, self.weight + weight, self.loss + loss * weight
        )


class Flags(NamedTuple):
    """Flags that any worker may raise; all workers see them at the same step."""

    pause: bool = False
    """The group must stop at this boundary."""
    save: bool = False
    """A checkpoint of the state after this step is requested."""
    busy: bool = False
    """An earlier checkpoint is still being written."""
    uncopied: bool = False
    """No copy of the state can be made for a buddy: this worker has no buddy, or the previous copy is still being sent.
    """


_FLAGS = len(Flags._fields)


def either(flags: Iterable[Flags]) -> Flags:
    """Return the flags that at least one worker raises."""
    return Flags(*map(any, zip(*flags, strict=True)))


def size(shards: int) -> int:
    """Return the length of the header of a job with `shards` shards."""
    return shards * _SLOTS + _FLAGS


def digits(shards: int, dtype: str) -> int:
    """Return how many numbers of the floating-point type `dtype` carry the header of a job with `shards` shards."""
    return size(shards) * 64 // _DIGIT_BITS[dtype]


def to_digits(header: npt.NDArray[np.int64], dtype: str) -> npt.NDArray[np.float64]:
    """Return the header as whole numbers that `dtype` sums exactly, given one writer for each."""
    return header.view(f"u{_DIGIT_BITS[dtype] // 8}").astype(np.float64)


def from_digits(summed: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.int64]:
    """Return the header from its summed digits. A flag raised by very many workers stays raised."""
    bits = _DIGIT_BITS[dtype]
    return np.minimum(summed, 2.0**bits - 1).astype(f"u{bits // 8}").view(np.int64)


def encode(reports: dict[int, ShardReport], shards: int, flags: Flags) -> npt.NDArray[np.int64]:
    """Return the header of a worker that hosts the shards in `reports`."""
    header = np.zeros(size(shards), dtype=np.int64)
    notes = header[:-_FLAGS].view(NOTE)
    for shard, report in reports.items():
        notes[shard] = tuple(report)
    header[-_FLAGS:] = flags
    return header


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The step as every worker sees it after the header is summed."""

    rows: int
    weight: float
    loss: float
    """Mean over all weight, summed in shard order: the same bits on every worker."""
    bad_shards: tuple[int, ...]
    """Shards whose loss or weight is not finite."""
    flags: Flags
    """Flags that at least one worker raised."""
    notes: bytes
    """Each shard's `NOTE`, in shard order."""


def decode(header: npt.NDArray[np.int64]) -> StepTotals:
    """Decode a summed header."""
    notes = header[:-_FLAGS].view(NOTE)
    # Add one at a time, in shard order: NumPy would use its own order.
    weight, loss = sum(notes["weight"].tolist()), sum(notes["loss"].tolist())
    bad = np.flatnonzero(~(np.isfinite(notes["weight"]) & np.isfinite(notes["loss"])))
    return StepTotals(
        rows=int(notes["rows"].sum()),
        weight=weight,
        loss=loss / weight if weight else float("nan"),
        bad_shards=tuple(bad.tolist()),
        flags=Flags(*(header[-_FLAGS:] != 0).tolist()),
        notes=notes.tobytes(),
    )
