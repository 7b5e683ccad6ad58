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
from raytrain_plus.collective.world import Operation, wait
from raytrain_plus.errors import TaskError
from raytrain_plus.parallel.half_precision import Half, check_carried, ring_wire
from raytrain_plus.parallel.wire import Plain


@dataclass
class Room:
    """What the members of a world have submitted, by name."""

    size: int
    sent: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    bytes: int = 0
    flushed: int = 0
    """The values that were sent as zero, as every member counts them."""


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

    def ended(self, within_s: float) -> bool:
        return len(self.room.sent[self.name]) == self.room.size

    def finish(self) -> None:
        parts = [self.room.sent[self.name][rank] for rank in range(self.room.size)]
        self.into.view(-1).copy_(self.join([part.view(-1) for part in parts]))  # type: ignore[operator]


def means(gradients: Sequence[torch.Tensor], dtype: torch.dtype, weight: float) -> tuple[list[torch.Tensor], Room]:
    """Return each member's mean of the members' gradients, and what travelled."""
    room, members = Room(len(gradients)), []
    for rank, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros_like(gradient))
        wire = Half([("p", parameter)], lambda kind: 2 if kind == torch.float32 else 0, dtype)
        assert parameter.grad is not None
        parameter.grad.copy_(gradient)
        wire.given.fill_(rank == 1)
        wire.rider.copy_(torch.tensor([1.0, rank]))
        members.append((wire, wire.submit(Member(rank, room), "gradients.0")))  # type: ignore[arg-type]
    assert all(work.ended(0) for _, works in members for work in works)
    # The first collective is complete: each member begins the second one.
    second = [[work.finish() for work in works] for _, works in members]
    for (wire, _), works in zip(members, second, strict=True):
        for work in works:
            if work is not None:
                assert work.ended(0)
                assert work.finish() is None
        wire.take_means(weight)
        assert wire.rider.tolist() == [len(members), sum(range(len(members)))]
        assert wire.given.tolist() == [float(len(members) > 1)]
        assert int(wire.flushed) == int(members[0][0].flushed)
    room.flushed = int(members[0][0].flushed)
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
    gradients = [torch.ones(100_000) for _ in range(4)]
    _, room = means(gradients, torch.bfloat16, 1.0)
    rider = 4 * 2 * 4
    # A member submits all of its bucket once and its part of the sum once; of n equal parts, each keeps one.
    travelled = (room.bytes - rider - 4 * 50_000) * 3 / 4 + 3 * 4 * 50_000
    ring = 4 * 2 * 3 / 4 * 400_000
    assert travelled / ring == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e-9, 1.0, 65504.0, 1e9, 1e37, 8e37])
def test_gradients_of_any_magnitude_travel(magnitude: float, dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -0.5, 0.001, 0.0, 1e-4, 0.25, -1.0]) * magnitude
    found, room = means([values, 2 * values, values], dtype, 2.0)
    torch.testing.assert_close(found[0], 2 * values, rtol=3 * torch.finfo(dtype).eps, atol=0.0)
    assert room.flushed == 0


def test_values_too_small_beside_others_are_counted_and_become_zero() -> None:
    # The members' two parts are sent in units of their own.
    gradients = [torch.tensor([1.0, 1e-13, 1e-3, 1e-13]), torch.tensor([1.0, 0.0, 1e-3, 0.0])]
    found, room = means(gradients, torch.float16, 1.0)
    assert room.flushed == 1
    assert [value == 0 for value in found[1].tolist()] == [False, True, False, False]


def test_float64_gradients_keep_their_range() -> None:
    found, room = means([torch.tensor([1e300, -1e290], dtype=torch.float64)] * 2, torch.bfloat16, 2.0)
    torch.testing.assert_close(found[0], torch.tensor([1e300, -1e290], dtype=torch.float64), rtol=0.01, atol=0.0)
    assert room.flushed == 0


def test_gradients_of_16_bits_are_added_in_32() -> None:
    # Added in bfloat16, 256 + 1 is 256.
    gradients = [torch.tensor([256.0, 1.0]).bfloat16(), *[torch.tensor([1.0, 1.0]).bfloat16()] * 4]
    found, _ = means(gradients, torch.bfloat16, 1.0)
    assert found[0].dtype == torch.bfloat16
    assert found[0].tolist() == [260.0, 5.0]


def test_means_of_16_bits_may_have_sums_that_exceed_them() -> None:
    found, _ = means([torch.tensor([4e4, 1.0]).half()] * 2, torch.float16, 2.0)
    assert found[0].tolist() == [4e4, 1.0]


def test_alone_gradients_of_16_bits_go_nowhere() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    wire = Half([("p", parameter)], lambda kind: 0, torch.bfloat16)
    assert wire.submit(SoloWorld(), "gradients.0") == []


def test_complex_gradients_keep_their_imaginary_parts() -> None:
    found, _ = means([torch.tensor([1 + 2j, -3 - 4j])] * 2, torch.bfloat16, 2.0)
    assert found[0].tolist() == [1 + 2j, -3 - 4j]


@pytest.mark.parametrize(
    ("dtype", "compressed", "kind"),
    [
        (torch.float32, None, Plain),
        (torch.complex64, None, Plain),
        (torch.float32, torch.bfloat16, Half),
        (torch.bfloat16, None, Half),
        (torch.float16, None, Half),
    ],
)
def test_the_wire_follows_from_the_dtype(dtype: torch.dtype, compressed: torch.dtype | None, kind: type) -> None:
    wire = ring_wire([("p", nn.Parameter(torch.zeros(2, dtype=dtype)))], lambda kind: 0, compressed)
    assert type(wire) is kind


def test_gradients_that_no_wire_carries_are_refused_by_name() -> None:
    odd = nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn))
    check_carried([("a", nn.Parameter(torch.zeros(2))), ("b", nn.Parameter(odd.detach(), requires_grad=False))])
    with pytest.raises(TaskError, match="'c' is float8_e4m3fn"):
        check_carried([("c", odd)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_not_finite_arrives_as_such(dtype: torch.dtype) -> None:
    found, _ = means([torch.tensor([float("nan"), 1.0, float("inf")]), torch.ones(3)], dtype, 2.0)
    assert str(found[1].tolist()) == "[nan, 1.0, inf]"


def test_one_worker_rounds_as_several_do() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    wire = Half([("p", parameter)], lambda kind: 0, torch.bfloat16)
    assert parameter.grad is not None
    parameter.grad.copy_(torch.tensor([1.001, 2.0, 3.0]))
    [work] = wire.submit(SoloWorld(), "gradients.0")
    wait([work], "the sum", 1)
    wire.take_means(1.0)
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0]
