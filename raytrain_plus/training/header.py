"""The header: what all workers must know of a step besides its gradients, as one int64 vector summed once per step.

    shard 0                              shard 1 ...   flags
    start | rows | ids | weight | loss                 pause | save | ...     (`data.ledger.NOTE`, `Flags`)

Each shard's slots have one writer; every other worker adds zero. So the sum passes the writer's bits to all workers
unchanged. Every worker computes the same loss, in shard order, independent of the ring. The upper half of `rows` holds
the signature of the shard's metrics, whose values follow the header if they have room: see `step_metrics`.

The header travels at the end of the first gradient bucket: a separate sum, however small, costs one more round of
agreement per step on what to sum. A floating-point bucket sums whole numbers exactly while they fit its significant
bits, so the header is sent as digits that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raytrain_plus.data.ledger import NOTE
from raytrain_plus.training.step_metrics import OwnMetrics, Table, signature

_SLOTS = NOTE.itemsize // 8
_DIGIT_BITS = {"float64": 32, "float32": 16}
_ROW_BITS = 32


class ShardReport(NamedTuple):
    """One shard's report on its part of a step, as in `data.ledger.NOTE`."""

    start: int
    rows: int = 0
    ids: int = 0
    weight: float = 0.0
    loss: float = 0.0
    metrics: Mapping[str, float] = MappingProxyType({})
    """The sum of each metric times weight; not part of the note."""

    def plus(
        self, rows: int, ids: int, weight: float, loss: float, metrics: Mapping[str, float] = MappingProxyType({})
    ) -> ShardReport:
        """Return the report with one more microbatch of that mean loss and weight, and these mean metrics.

        A metric without weight is a mean of nothing, often NaN, and does not count.
        """
        return ShardReport(
            self.start,
            self.rows + rows,
            (self.ids + ids) % 2**64,
            self.weight + weight,
            self.loss + loss * weight,
            {name: self.metrics.get(name, 0.0) + (value * weight if weight else 0.0) for name, value in metrics.items()}
            if metrics
            else self.metrics,
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
    """Return the length of the header of a job with `shards` shards, without metrics."""
    return shards * _SLOTS + _FLAGS


def digits(shards: int, dtype: str, metrics: int = 0) -> int:
    """Return how many numbers of the floating-point type `dtype` carry the header of a job with `shards` shards.

    `metrics`: the number of metrics of each shard for which there is room.
    """
    return (size(shards) + shards * metrics) * 64 // _DIGIT_BITS[dtype]


def room(numbers: int, shards: int, dtype: str) -> int:
    """Return for how many metrics of each shard there is room in a rider of that many numbers."""
    return (numbers * _DIGIT_BITS[dtype] // 64 - size(shards)) // shards


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
        notes[shard] = report[:_SLOTS]
        notes["rows"][shard] |= signature(report.metrics) << _ROW_BITS
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
    signatures: Mapping[int, int] = field(default_factory=dict)
    """The signature of the metrics of each shard that has rows."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over all weight, summed in shard order."""


def with_metrics(header: npt.NDArray[np.int64], own: OwnMetrics, shards: int, room: int) -> npt.NDArray[np.int64]:
    """Return the header followed by `room` metrics of each shard, which stay zero if `own` are more than that."""
    table = np.zeros((shards, room))
    if own.sums is not None and len(own.names) <= room:
        table[:, : len(own.names)] = own.sums
    return np.concatenate([header, table.reshape(-1).view(np.int64)])


def metrics_of(header: npt.NDArray[np.int64], shards: int) -> Table:
    """Return the metrics that follow a summed header, with a row for each shard."""
    return header[size(shards) :].view(np.float64).reshape(shards, -1)


def decode(header: npt.NDArray[np.int64]) -> StepTotals:
    """Decode a summed header."""
    notes = header[:-_FLAGS].view(NOTE).copy()
    signatures = notes["rows"] >> _ROW_BITS
    notes["rows"] &= (1 << _ROW_BITS) - 1
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
        signatures={shard: int(signatures[shard]) for shard in np.flatnonzero(notes["rows"]).tolist()},
    )
