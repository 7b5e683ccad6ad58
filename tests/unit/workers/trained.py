"""Build a small worker state after one step. Not a test itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from raytrain_plus.device_copies import StateCopies
from raytrain_plus.state.holding import Holding


def holding() -> Holding:
    model = torch.nn.Linear(5, 3)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([value for _, value in named])
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return Holding({}, named, [], optimizer, None, {"weight": -3})


class LateCopies(StateCopies):
    """Copies that are made only when somebody waits for them, as from a GPU that is busy."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def copy(self, sources: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin to copy, in vain until the function that this returns is called."""
        kept = [source.clone() for source in sources]
        for room in rooms:
            room.fill_(255)
        return lambda: [room.copy_(source) for room, source in zip(rooms, kept, strict=True)] and None
