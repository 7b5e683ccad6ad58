"""The ledger's words: which rows a shard gave to a step, as a note that anyone can check. Pure.

A row is known by its file (relative to the data's path), its row group, and its place in it. Its id is

    key = the first eight bytes, little-endian, of SHA-256 over the file's relative path in UTF-8
    id  = splitmix64(splitmix64(key + row group) + place) >> 32

in arithmetic modulo 2^64, with splitmix64 as in `data.line`. Rows carry their ids from the moment they are read,
through every permutation, cut and transfer, to the forward pass; a note holds the sum of the ids of the rows that
passed. With 32 bits an id, sums of very many rows fit 63 bits, a wrong row goes unseen once in 4 billion times, and a
note is small.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from raytrain_plus.data.line import splitmix64

ROW_ID = "_raytrain_id"
"""The column in which rows carry their ids."""


NOTE = np.dtype([("start", "<i8"), ("rows", "<i8"), ("ids", "<i8"), ("weight", "<f8"), ("loss", "<f8")])
"""What one shard gave to one step.

`start`: where its rows begin in the shard's own sequence of rows, counted from the first row of epoch 0. `rows`: how
many went through the forward pass. `ids`: the sum of their ids. `weight`: what they weigh together, as many as they are
unless the task's loss says otherwise. `loss`: the sum of loss times weight over the shard's microbatches.
"""


def row_ids(file: str, group: int, rows: int) -> npt.NDArray[np.uint64]:
    """The ids of a row group's rows, in the file's order."""
    key = int.from_bytes(hashlib.sha256(file.encode()).digest()[:8], "little")
    start = splitmix64(np.full(rows, (key + group) & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64))
    places = np.arange(rows, dtype=np.uint64)
    return splitmix64(start + places) >> np.uint64(32)
