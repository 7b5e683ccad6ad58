"""Bring the rows that each member of a world has changed to all its members, after a step of a sharded optimizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from raytrain_plus.collective.world import Work
from raytrain_plus.membership.pieces import Piece, Pieces, split
from raytrain_plus.training.exchange.context import StepContext

MOST_BYTES = 8 << 20
"""Maximum bytes that a member sends at once, unless one row is larger."""
AT_ONCE = 2
"""How many such sends are under way at once."""
_ALIGNED = 16
"""Rows begin at multiples of this many bytes, so that any dtype can be viewed there."""

Round = list[list[Piece]]
"""What each member sends at once, by rank."""


def rounds_of(sent: Sequence[Pieces], row_bytes: Mapping[str, int], most: int) -> list[Round]:
    """Return what each member sends one after the other: at most `most` bytes at once, unless one row is larger.

    >>> [[len(pieces) for pieces in one] for one in rounds_of([Pieces.of([Piece("a", 0, 5)]), Pieces()], {"a": 16}, 32)]
    [[1, 0], [1, 0], [1, 0]]
    """
    columns: list[list[list[Piece]]] = []
    for pieces in sent:
        column: list[list[Piece]] = []
        filled = 0
        for piece in split(pieces, row_bytes, most):
            size = _aligned((piece.last - piece.first) * row_bytes[piece.name])
            if not column or filled + size > most:
                column.append([])
                filled = 0
            column[-1].append(piece)
            filled += size
        columns.append(column)
    return [
        [column[number] if number < len(column) else [] for column in columns]
        for number in range(max(map(len, columns), default=0))
    ]


class Spread:
    """Sends and receives rows in one generation."""

    def __init__(self, sent: Sequence[Pieces], row_counts: Mapping[str, int]) -> None:
        """Prepare.

        `sent`: the rows that each member sends, by rank: all rows, each once. `row_counts`: the rows of each weight,
        one if it is not divided.
        """
        self._sent = sent
        self._row_counts = row_counts
        self._rounds: dict[tuple[torch.dtype, ...], list[Round]] = {}
        """By the dtypes of the tensors."""

    def run(self, tensors: Mapping[str, torch.Tensor], name: str, what: str, context: StepContext) -> None:
        """Fill `tensors`, by weight, with the rows of all members; those that this one sends are there already.

        `name` is that of the operations, `what` describes them. Raises the errors of `StepContext.wait`.
        """
        self.begin(tensors, name, what, context).finish()

    def begin(self, tensors: Mapping[str, torch.Tensor], name: str, what: str, context: StepContext) -> Exchange:
        """Begin the same; the result's `finish` ends it. The first rows are then on their way."""
        return Exchange(self, tensors, name, what, context)

    def planned(self, tensors: Mapping[str, torch.Tensor]) -> list[Round]:
        """Return what the members send of such tensors, one after the other."""
        kinds = tuple(tensor.dtype for tensor in tensors.values())
        if kinds not in self._rounds:
            row_bytes = {name: value.nbytes // max(1, self._row_counts[name]) for name, value in tensors.items()}
            self._rounds[kinds] = rounds_of(self._sent, row_bytes, MOST_BYTES)
        return self._rounds[kinds]

    def places(
        self, tensors: Mapping[str, torch.Tensor], pieces: Sequence[Piece], memory: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield rows of tensors, each with its place in a member's memory."""
        at = 0
        for piece in pieces:
            rows = self.rows(tensors, piece)
            yield rows, memory[at : at + rows.nbytes].view(rows.dtype).view(rows.shape)
            at += _aligned(rows.nbytes)

    def rows(self, tensors: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
        """Return rows of one of the tensors."""
        tensor = tensors[piece.name].detach()
        return tensor if self._row_counts[piece.name] == 1 else tensor[piece.first : piece.last]


class Exchange:
    """Rows that are under way between the members."""

    def __init__(
        self, spread: Spread, tensors: Mapping[str, torch.Tensor], name: str, what: str, context: StepContext
    ) -> None:
        """Send the first rows; the arguments are those of `Spread.run`."""
        self._spread = spread
        self._tensors = tensors
        self._name = name
        self._what = what
        self._context = context
        self._left = deque(enumerate(spread.planned(tensors)))
        self._under_way: deque[tuple[Work, Round, torch.Tensor]] = deque()
        self._send()

    def finish(self) -> None:
        """Wait until all rows are here. Raises the errors of `StepContext.wait`."""
        while self._under_way:
            # The next rows are packed while these are on their way.
            self._send()
            self._take(*self._under_way.popleft())

    def _send(self) -> None:
        """Have as many rows under way as there may be."""
        world = self._context.world
        while self._left and len(self._under_way) < AT_ONCE:
            number, one = self._left.popleft()
            size = max(sum(_aligned(self._spread.rows(self._tensors, piece).nbytes) for piece in own) for own in one)
            device = next(iter(self._tensors.values())).device
            own = torch.empty(size, dtype=torch.uint8, device=device)
            for rows, room in self._spread.places(self._tensors, one[world.rank], own):
                room.copy_(rows)
            into = torch.empty((world.size, size), dtype=torch.uint8, device=device)
            self._under_way.append((world.gather(own, into, f"{self._name}.{number}"), one, into))

    def _take(self, work: Work, one: Round, into: torch.Tensor) -> None:
        self._context.wait([work], self._what)
        for rank, pieces in enumerate(one):
            if rank != self._context.world.rank:
                for rows, room in self._spread.places(self._tensors, pieces, into[rank]):
                    rows.copy_(room)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
