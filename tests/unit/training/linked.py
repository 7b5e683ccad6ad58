"""Worlds of a replica in threads, whose members send to each other by NCCL, with a stand-in for it."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import pytest
import torch

from raytrain_plus.collective import nccl_peers
from raytrain_plus.collective.nccl_peers import NcclPeers
from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.parallel.pipeline.layout import directions
from tests.unit.collective.stand_in_nccl import Links
from tests.unit.parallel.pipeline.replicas import Mail, Threads


class Linked:
    """Makes `Threads` that send by NCCL, once all of a replica have formed their links."""

    def __init__(self, schedule: Schedule, shape: Shape) -> None:
        self.size = shape.stages * shape.tensor_ranks
        self.directions = directions(schedule, shape.stages, shape.tensor_ranks)
        self.links: dict[int, Links] = {}
        self.carried: set[tuple[int, int]] = set()

    def __call__(self, rank: int, mail: Mail) -> _Member:
        return _Member(self, rank, mail, self.links.setdefault(id(mail), Links()))


class _Host(Threads):
    def close(self) -> None:
        """Do nothing."""


class _Member:
    def __init__(self, of: Linked, rank: int, mail: Mail, links: Links) -> None:
        self.rank, self._of = rank, of
        host: Any = _Host(rank, mail)
        host.size = of.size
        self._made = NcclPeers(host, of.directions, 20, lambda: False).join(links.of(rank))

    @cached_property
    def _peers(self) -> NcclPeers:
        until = time.monotonic() + 20
        while self._made.forming:
            assert time.monotonic() < until
            time.sleep(0.001)
        self._made.use_formed()
        return self._made

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        if tensor.is_floating_point():
            self._of.carried.add((self.rank, to))
        return self._peers.send(tensor, to, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        return self._peers.receive(tensor, source, tag)


@pytest.fixture
def by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of floating numbers count as those of a device; the ids of links are known beforehand."""
    monkeypatch.setattr(nccl_peers, "on_host", lambda tensor: not tensor.is_floating_point())

    def ids(host: Any, *_: Any) -> list[list[bytes]]:
        return [[bytes([sender, receiver]) for receiver in range(host.size)] for sender in range(host.size)]

    monkeypatch.setattr(nccl_peers, "shared_ids", ids)
