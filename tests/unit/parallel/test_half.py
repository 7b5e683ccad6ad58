"""Gradients in 16 bits: the same bits on every member, the mean of what each has sent, half the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation
from raytrain_plus.parallel.half import Half


@dataclass
class Room:
    """What the members of a world have submitted, by name."""

    size: int
    sent: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    bytes: int = 0


@dataclass
class Member:
    """A world in which nobody waits: an operation is done once all have submitted it."""

    rank: int
    room: Room

    @property
    def size(self) -> int:
        return self.room.size

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Moved:
        return self._submit(tensor, tensor, name, lambda parts: torch.stack(parts).sum(0))

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Moved:
        return self._submit(tensor, into, name, torch.cat)

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Moved:
        return self._submit(
            tensor, into, name, lambda parts: torch.cat([part.view(self.size, -1)[self.rank] for part in parts])
        )

    def _submit(self, tensor: torch.Tensor, into: torch.Tensor, name: str, join) -> Moved:  # type: ignore[no-untyped-def]
        assert tensor.is_contiguous()
        assert into.is_contiguous()
        self.room.sent.setdefault(name, {})[self.rank] = tensor.clone()
        self.room.bytes += tensor.nbytes
        return Moved(self.room, name, into, join)


@dataclass
class Moved:
    room: Room
    name: str
    into: torch.Tensor
    join: object

    def done(self) -> bool:
        return len(self.room.sent[self.name]) == self.room.size

    def finish(self) -> None:
        parts = [self.room.sent[self.name][rank] for rank in range(self.room.size)]
        self.into.view(-1).copy_(self.join([part.view(-1) for part in parts]))  # type: ignore[operator]


def means(gradients: Sequence[torch.Tensor], dtype: torch.dtype, weight: float) -> tuple[list[torch.Tensor], Room]:
    """Return each member's mean of the members' gradients, and what travelled."""
    room, members = Room(len(gradients)), []
    for rank, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros_like(gradient))
        wire = Half([("p", parameter)], lambda kind: 2 if kind == torch.float32 else 0, dtype, weight)
        assert parameter.grad is not None
        parameter.grad.copy_(gradient)
        wire.rider.copy_(torch.tensor([1.0, rank]))
        members.append((wire, wire.submit(Member(rank, room), "gradients.0")))  # type: ignore[arg-type]
    # The first collective is complete: each member begins the second one, and only the last sees all of it.
    assert [works[-1].done() for _, works in members] == [False] * (len(members) - 1) + [True]
    for wire, works in members:
        for work in works:
            assert work.done()
            work.finish()
        wire.take_means(weight)
        assert wire.rider.tolist() == [len(members), sum(range(len(members)))]
    return [wire.views[0] for wire, _ in members], room


VALUES = st.lists(st.floats(-100, 100, width=32), min_size=7, max_size=7)


@given(st.lists(VALUES, min_size=1, max_size=4), st.sampled_from([torch.float16, torch.bfloat16]), st.integers(1, 5000))
def test_every_member_has_the_mean_of_what_was_sent_rounded_twice(
    rows: list[list[float]], dtype: torch.dtype, weight: int
) -> None:
    found, _ = means([torch.tensor(row) * weight for row in rows], dtype, weight)
    exact = torch.tensor(rows, dtype=torch.float64).sum(0)
    for one in found:
        assert torch.equal(one, found[0])
    # Each number is rounded once by its sender, and the sum once: half a unit in the last place each time.
    digits = torch.finfo(dtype).eps
    allowed = digits * (torch.tensor(rows, dtype=torch.float64).abs().sum(0) + exact.abs()) + 1e-4
    assert bool(((found[0].double() - exact).abs() <= allowed).all())


def test_half_the_bytes_of_float32_travel_in_all() -> None:
    gradients = [torch.ones(1000) for _ in range(4)]
    _, room = means(gradients, torch.bfloat16, 1.0)
    rider = 4 * 2 * 4
    # A member submits all of its bucket once and its part of the sum once; of n equal parts, each keeps one.
    travelled = (room.bytes - rider - 4 * 500) * 3 / 4 + 3 * 4 * 500
    ring = 4 * 2 * 3 / 4 * 4000
    assert travelled / ring == pytest.approx(0.5, rel=0.01)


def test_a_sum_that_float16_does_not_hold_travels_as_its_mean() -> None:
    found, _ = means([torch.full((3,), 60000.0 * 512)] * 2, torch.float16, 1024.0)
    assert found[0].tolist() == [60000.0] * 3
    found, _ = means([torch.full((3,), 70000.0 * 512)] * 2, torch.float16, 1024.0)
    assert found[0].tolist() == [float("inf")] * 3
    found, _ = means([torch.full((3,), 1e30)] * 2, torch.bfloat16, 2.0)
    assert found[0].tolist() == [float(torch.tensor(1e30, dtype=torch.bfloat16))] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_not_finite_arrives_as_such(dtype: torch.dtype) -> None:
    found, _ = means([torch.tensor([float("nan"), 1.0, float("inf")]), torch.ones(3)], dtype, 2.0)
    assert str(found[1].tolist()) == "[nan, 1.0, inf]"


def test_one_worker_rounds_as_several_do() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    wire = Half([("p", parameter)], lambda kind: 0, torch.bfloat16, 1.0)
    assert parameter.grad is not None
    parameter.grad.copy_(torch.tensor([1.001, 2.0, 3.0]))
    [work] = wire.submit(SoloWorld(), "gradients.0")
    assert work.done()
    work.finish()
    wire.take_means(1.0)
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0]
