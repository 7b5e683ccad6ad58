"""Copies to the host that complete late and in another order, as those of a GPU may: `collective.staged.Copies`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import torch


class LateCopies:
    """Treats every tensor as one of a device; a copy has wrong values until it is complete.

    `draw` gives the seconds that each copy takes.
    """

    def __init__(self, draw: Callable[[], float] = lambda: random.uniform(0, 0.003)) -> None:
        self._draw = draw

    def apart(self, tensor: torch.Tensor) -> bool:
        return True

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        room, complete = self.room(tensor), threading.Event()

        def copied() -> None:
            room.copy_(tensor)
            complete.set()

        threading.Timer(self._draw(), copied).start()

        def wait() -> None:
            assert complete.wait(10), "the copy is complete"

        return room, wait

    def room(self, like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, 77)

    def back(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor.copy_(host)
