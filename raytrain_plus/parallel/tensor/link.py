"""Sum over the slices of a layer in a fixed tree, so that the bits do not depend on which workers host them.

The leaves of the tree are the slices, in order: neighbours are added, then neighbouring pairs, and so on. A worker adds
up the subtree of the slices that it hosts. Then workers exchange their sums with those at distance 1, 2, 4, ..., and
each adds what it gets (recursive doubling; Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005). Both sides of an exchange add the same two numbers, so all workers have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Exchange = Callable[[torch.Tensor, int], torch.Tensor]
"""Gives a tensor to the worker with a tensor rank, and returns what that one gives."""


class Link:
    """How the slices that a worker hosts meet those of the other workers of its stage.

    The modules that are cut keep it; its workers change from generation to generation.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, exchange: Exchange | None = None) -> None:
        """Link a worker with this tensor rank, out of `ranks`. `exchange` reaches the others, and may come later."""
        self.rank = rank
        self.ranks = ranks
        self.exchange = exchange

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all slices, given the part of each hosted one."""
        total = _subtree(parts)
        for distance in self._distances():
            total = total + self._given(total, distance)
        return total

    def own_of_sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this worker's share of the positions (dimension -2) of that sum, with its bits.

        The same tree by recursive halving: at each distance, a worker gives away what the other one's side keeps.
        """
        held = dict(enumerate(_subtree(parts).chunk(self.ranks, -2)))
        for distance in self._distances():
            away = [held.pop(number) for number in list(held) if (number ^ self.rank) & distance]
            given = self._given(torch.stack(away), distance)
            held = {number: one + other for (number, one), other in zip(held.items(), given, strict=True)}
        return held[self.rank].contiguous()

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Return all positions (dimension -2), given those of this worker."""
        return torch.cat(self.gather([own]), -2) if self.ranks > 1 else own

    def largest(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the largest of all slices' numbers, element by element, given those of each hosted one."""
        found = torch.stack(list(parts)).amax(0)
        for distance in self._distances():
            found = torch.maximum(found, self._given(found, distance))
        return found

    def gather(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what all slices have, in order, given what the hosted ones have."""
        found = torch.stack(list(parts))
        for distance in self._distances():
            other = self._given(found, distance)
            found = torch.cat([other, found] if self.rank & distance else [found, other])
        return list(found)

    def _distances(self) -> list[int]:
        return [1 << level for level in range(self.ranks.bit_length() - 1)]

    def _given(self, own: torch.Tensor, distance: int) -> torch.Tensor:
        assert self.exchange is not None, "the workers of a stage are in a world before they compute"
        return self.exchange(own.contiguous(), self.rank ^ distance)


def _subtree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    level = list(parts)
    while len(level) > 1:
        level = [first + second for first, second in zip(level[::2], level[1::2], strict=True)]
    return level[0]
