"""The ledger's words: which rows a shard gave to a step, as a note that anyone can check. Pure.

A row is known by its file (relative to the data's path), its row group, and its place in it. Its id is

    key = the first eight bytes, little-endian, of SHA-256 over the file's relative path in UTF-8
    id  = splitmix64(splitmix64(key + row group) + place)

in arithmetic modulo 2^64, with splitmix64 as in `data.line`. Rows carry their ids from the moment they are read,
through every permutation, cut and transfer, to the forward pass; a note holds the sum, modulo 2^64, of the ids of the
rows that passed.

What is written down is one number for all of a step's notes, and of each shard's sum its lowest bits: with 64 of each
note, a ledger of many shards and small rows would be larger than one hundredth of what they read.

    step_ids = the sum over all shards of splitmix64(the note's ids + shard): in the row of shard 0, null in others
    ids      = the lowest `kept_bits(shards)` bits of the note's ids

So a wrong row, or one that another shard was to read, goes unseen once in 2^64 times. Which shard it was is told by the
shard's own bits; where these do not tell, the whole step is named.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from raytrain_plus.data.sample_order import splitmix64

ROW_ID = "_raytrain_id"
"""The column in which rows carry their ids."""
NOTE_BITS = 390
"""What a step's shards may take together for their sums, in bits."""


NOTE = np.dtype([("start", "<i8"), ("rows", "<i8"), ("ids", "<u8"), ("weight", "<f8"), ("loss", "<f8")])
"""What one shard gave to one step.

`start`: where its rows begin in the shard's own sequence of rows, counted from the first row of epoch 0. `rows`: how
many went through the forward pass. `ids`: the sum of their ids modulo 2^64. `weight`: what they weigh together, as many
as they are unless the task's loss says otherwise. `loss`: the sum of loss times weight over the shard's microbatches.
"""


def row_ids(file: str, group: int, rows: int) -> npt.NDArray[np.uint64]:
    """The ids of a row group's rows, in the file's order."""
    key = int.from_bytes(hashlib.sha256(file.encode()).digest()[:8], "little")
    start = splitmix64(np.full(rows, (key + group) & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64))
    places = np.arange(rows, dtype=np.uint64)
    return splitmix64(start + places)


def step_sum(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """What stands for the notes' `ids`, whose last dimension is the shard."""
    shifted: npt.NDArray[np.uint64] = np.add(ids, np.arange(ids.shape[-1], dtype=np.uint64))
    summed: npt.NDArray[np.uint64] = splitmix64(shifted).sum(axis=-1, dtype=np.uint64)
    return summed


def kept_bits(shards: int) -> int:
    """How many of a note's bits the ledger of a job with so many shards keeps: one, packed, has one more."""
    return min(64, max(0, NOTE_BITS // shards - 1))
