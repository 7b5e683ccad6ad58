"""Hash the whole state and write its model to a file, from the workers that hold its stages. Pure.

It fetches a few tensors at a time, so that no process has to hold the model, let alone the optimizer's state.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from raytrain_plus.errors import Interrupted
from raytrain_plus.membership.pieces import Piece, Pieces, assign, union
from raytrain_plus.membership.slice_names import whole_weight
from raytrain_plus.state.entry import REBUILT, StateTensor, to_export
from raytrain_plus.state.slices import Joining
from raytrain_plus.state.stored.tensorfile import header

BATCH = 64 << 20
"""Maximum bytes requested at once; a larger tensor is requested alone."""

Begin = Callable[[int, tuple[Piece, ...]], Callable[[], Sequence[Any]]]
"""Starts to fetch these pieces of tensors from the holder with this number; the returned function waits for them."""
Part = tuple[StateTensor, Piece]
"""A tensor of the state, and a piece of it."""


class Digest(Protocol):
    """A hash object, as in `hashlib`."""

    def update(self, data: Any, /) -> None: ...


Round = tuple[list[tuple[int, Part]], Joining, Digest | None]
"""What is fetched for tensors' first names, or for further ones; what joins it; the hash, which has no tensor twice."""


def model_file(inventories: Sequence[Sequence[StateTensor]], begin: Begin, digest: Digest) -> Iterator[Any]:
    """Yield the pieces of a safetensors file of the model, and update `digest` with the whole state.

    `inventories`: for each holder, the tensors that it has, or rows of them; a row that several have comes from one of
    them. A tensor that is cut into slices is one in the file; until all of them have come, they are kept. One with
    several names is in the file under each, because `load_state_dict` expects them all; it is fetched again for each.
    For frozen weights that are not saved there are digests: see `rebuilt_metadata`.

    Raises `Interrupted` if a holder delivers other sizes than its inventory lists.
    """
    parts = ordered(inventories)
    entries = {entry.name: entry for _, (entry, _) in parts}
    exported = to_export(entries)
    rounds: list[Round] = [(parts, Joining(entries, set(exported)), digest)]
    for number in range(max((len(entries[name].also) for name in exported), default=0)):
        again = {name: entries[name] for name in exported if len(entries[name].also) > number}
        rounds.append(([part for part in parts if part[1][0].name in again], Joining(again, set(again)), None))
    named = [
        (entry.also[number - 1] if number else entry.name.partition("/")[2], entry.dtype, entry.shape, entry.size)
        for number, (_, joining, _) in enumerate(rounds)
        for entry in joining.model()
    ]
    yield header(named, {"format": "pt"} | rebuilt_metadata(entries.values()))
    begun: deque[tuple[list[Part], Callable[[], Sequence[Any]], Digest | None, Joining]] = deque()
    for some, joining, hashed in rounds:
        for holder, batch in batches(some, BATCH):
            # Fetch the next batch while one is being written.
            begun.append((batch, begin(holder, tuple(piece for _, piece in batch)), hashed, joining))
            if len(begun) > 1:
                yield from _taken(*begun.popleft())
    while begun:
        yield from _taken(*begun.popleft())


def rebuilt_metadata(entries: Iterable[StateTensor]) -> dict[str, str]:
    """Return what a file of the model says of the weights that it lacks: their digests in hexadecimal, as JSON.

    Slices of a weight have the digest of the whole one.

    >>> rebuilt_metadata([StateTensor(name="rebuilt/a@1.w", dtype="uint8", shape=(1,), size=1, scalar=b"k")])
    {'rebuilt': '{"a.w": "6b"}'}
    """
    found = {
        whole_weight(entry.name.removeprefix(REBUILT)): entry.scalar.hex()
        for entry in entries
        if entry.name.startswith(REBUILT)
    }
    return {"rebuilt": json.dumps(found)} if found else {}


def ordered(inventories: Sequence[Sequence[StateTensor]]) -> list[tuple[int, Part]]:
    """Return every row of every tensor once, by name, with the number of the holder that delivers it."""
    entries = {entry.name: entry for inventory in inventories for entry in inventory}
    held = {
        holder: Pieces.of(Piece(entry.name, *(entry.held or (0, entry.rows))) for entry in inventory)
        for holder, inventory in enumerate(inventories)
    }
    row_bytes = {name: entry.size // entry.rows for name, entry in entries.items()}
    given = assign(union(held.values()), held, row_bytes)
    pieces = sorted((piece, holder) for holder, own in given.items() for piece in own)
    return [(holder, (entries[piece.name], piece)) for piece, holder in pieces]


def batches(parts: Sequence[tuple[int, Part]], most: int) -> Iterator[tuple[int, list[Part]]]:
    """Yield runs of pieces from one holder, of up to `most` bytes, as (holder, pieces).

    >>> state = [(StateTensor(name=name, dtype="uint8", shape=(4,), size=4), Piece(name, 0, 4)) for name in "abcd"]
    >>> found = batches(list(zip((0, 0, 0, 1), state)), 8)
    >>> [(holder, [entry.name for entry, _ in batch]) for holder, batch in found]
    [(0, ['a', 'b']), (0, ['c']), (1, ['d'])]
    """
    batch: list[Part] = []
    giver, size = -1, 0
    for holder, part in parts:
        if batch and (holder != giver or size + _bytes(part) > most):
            yield giver, batch
            batch, size = [], 0
        giver = holder
        batch.append(part)
        size += _bytes(part)
    if batch:
        yield giver, batch


def _bytes(part: Part) -> int:
    entry, piece = part
    return entry.size // entry.rows * (piece.last - piece.first)


def _taken(
    batch: list[Part], wait: Callable[[], Sequence[Any]], digest: Digest | None, joining: Joining
) -> Iterator[Any]:
    for (entry, piece), data in zip(batch, wait(), strict=True):
        expected = _bytes((entry, piece))
        if memoryview(data).nbytes != expected:
            raise Interrupted(f"{entry.name} arrived with {memoryview(data).nbytes} bytes, expected {expected}")
        if digest is not None:
            if not piece.first:
                digest.update(entry.head)
            digest.update(entry.scalar or data)
        yield from joining.add(entry, data)
