"""The ledger's entries: a verifiable note of the rows that a shard contributed to a step. Pure.

A row is identified by its file (relative to the data's path), its row group, and its place in that group. In a mix, the
relative path begins with the number of the source and a slash. The id of a row is

    key = the first eight bytes, little-endian, of SHA-256 over the file's relative path in UTF-8
    id  = splitmix64(splitmix64(key + row group) + place)

in arithmetic modulo 2^64, with splitmix64 as in `data.order.sample_order`. Rows carry their ids from the moment they
are read, through every permutation, slice and transfer, to the forward pass. A note holds the sum, modulo 2^64, of the
ids of the rows that passed.

The ledger stores one number for all of a step's notes, and only the lowest bits of each shard's sum. With 64 bits for
each note, a ledger of many shards and small rows would exceed one hundredth of the data that they read.

    step_ids = the sum over all shards of splitmix64(the note's ids + shard): in the row of shard 0, null in others
    ids      = the lowest `kept_bits(shards)` bits of the note's ids

So a wrong row, or a row that another shard should have read, goes undetected once in 2^64 times. The shard's own bits
identify the shard; if they do not, the audit reports the whole step.

    skipped      = how many rows of the span were left out because they cannot be used
    skipped_rows = their places, from 0, in the span; null if there are none

Files in which no row is skipped lack these two columns. The notes' ids are those of the other rows, so each row of a
span is either used or skipped.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from raytrain_plus.data.order.sample_order import splitmix64

ROW_ID = "_raytrain_id"
"""The column in which rows carry their ids."""
NOTE_BITS = 390
"""Maximum bits that the sums of all shards of one step may take together."""


NOTE = np.dtype(
    [("start", "<i8"), ("rows", "<i8"), ("ids", "<u8"), ("weight", "<f8"), ("loss", "<f8"), ("skipped", "<i8")]
)
"""The contribution of one shard to one step.

`start`: the position of its first row in the shard's own sequence, counted from the first row of epoch 0. `rows`: the
number of rows that went through the forward pass. `ids`: the sum of their ids modulo 2^64. `weight`: their total
weight, which is `rows` unless the task's loss returns another. `loss`: the sum of loss times weight over the shard's
microbatches. `skipped`: the number of rows that were left out (`data.on_error: skip`). The shard's span of the step is
`rows + skipped` rows long.
"""
SKIPPED = np.dtype([("shard", "<i8"), ("offset", "<i8")])
"""A row that was left out of a step: its shard, and its place, from 0, in the shard's span of the step."""


def row_ids(file: str, group: int, rows: int) -> npt.NDArray[np.uint64]:
    """Return the ids of a row group's rows, in the file's order."""
    key = int.from_bytes(hashlib.sha256(file.encode()).digest()[:8], "little")
    start = splitmix64(np.full(rows, (key + group) & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64))
    places = np.arange(rows, dtype=np.uint64)
    return splitmix64(start + places)


def step_sum(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a step's `step_ids` from its notes' `ids`, whose last dimension is the shard."""
    shifted: npt.NDArray[np.uint64] = np.add(ids, np.arange(ids.shape[-1], dtype=np.uint64))
    summed: npt.NDArray[np.uint64] = splitmix64(shifted).sum(axis=-1, dtype=np.uint64)
    return summed


def kept_bits(shards: int) -> int:
    """Return how many bits of a note's sum the ledger of a job with `shards` shards keeps.

    A packed value takes one bit more.
    """
    return min(64, max(0, NOTE_BITS // shards - 1))
