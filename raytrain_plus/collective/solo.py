"""The world of a single worker, whose sums are already complete."""

from __future__ import annotations

import torch

from raytrain_plus.collective.world import Operation, Work


class _Done:
    def done(self) -> bool:
        return True

    def finish(self) -> None:
        return None


class SoloWorld:
    """A world with one member and no sockets."""

    rank = 0
    size = 1

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        """Leave `tensor` unchanged."""
        return _Done()

    def close(self) -> None:
        """Do nothing: the world holds no resources."""
