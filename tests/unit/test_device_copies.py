"""Copies between host and device; a recorder stands in for the streams of a GPU."""

from __future__ import annotations

from collections import UserDict, namedtuple
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytrain_plus import device_copies
from raytrain_plus.device_copies import BatchCopies, Numbers, StateCopies, from_host, pinned, read_together

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_numbers_of_any_shape_and_dtype_are_read_with_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    monkeypatch.setattr(device_copies, "to_host", lambda tensor: copies.append(tensor) or tensor.cpu())
    tiny = torch.tensor(1e-300, dtype=torch.float64)
    given = [torch.tensor(0.1), torch.tensor([[2**40, -1]]), torch.tensor([True]), torch.zeros(0), tiny]
    numbers = [Numbers(one) for one in given]
    read_together(numbers)
    assert len(copies) == 1
    read_together(numbers)
    wanted = [[float(torch.tensor(0.1))], [2.0**40, -1.0], [1.0], [], [1e-300]]
    assert [one.values() for one in numbers] == wanted
    assert len(copies) == 1
    later = Numbers(torch.tensor([3.0]))
    assert later.values() == [3.0]
    assert len(copies) == 2


def test_a_tensor_of_the_host_stays_where_it_is_on_a_cpu() -> None:
    tensor = torch.arange(3)
    assert from_host(tensor, CPU) is tensor


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU whose memory is the host's; returns what it is asked to do."""
    told: list[str] = []
    streams = iter(["side"])

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=next(streams))

    @contextmanager
    def on(stream: SimpleNamespace) -> Any:
        told.append(f"on {stream.name}")
        yield
        told.append(f"off {stream.name}")

    computing = SimpleNamespace(
        name="computing", wait_stream=lambda other: told.append(f"computing waits for {other.name}")
    )
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: _pinned(tensor))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: hasattr(tensor, "pinned"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.append(f"used by {stream.name}"))
    plain = torch.Tensor.to

    def to(tensor: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if device != CUDA:
            return plain(tensor, device, *args, **kwargs)
        told.append(f"copy {tensor.numel()}{'' if kwargs.get('non_blocking') else ' and wait'}")
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", to)
    return told


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


Pair = namedtuple("Pair", "x y")


def test_pinned_batches_are_copied_beside_the_computation(gpu: list[str]) -> None:
    given = {"a": torch.ones(1), "b": [Pair(torch.ones(2), "text"), (torch.ones(3),)]}
    copied = BatchCopies(CUDA)(pinned(given))
    each = [["on side", f"copy {count}", "off side", "used by computing"] for count in (1, 2, 3)]
    assert gpu == [*each[0], *each[1], *each[2], "computing waits for side"]
    assert type(copied["b"][0]) is Pair
    assert copied["b"][0].y == "text"
    assert copied["b"][1][0].tolist() == [1.0] * 3


def test_a_batch_that_is_not_pinned_is_copied_on_the_stream_that_computes(gpu: list[str]) -> None:
    BatchCopies(CUDA)([torch.ones(2)])
    assert gpu == ["copy 2", "computing waits for side"]


def test_small_numbers_go_to_a_gpu_without_a_wait(gpu: list[str]) -> None:
    from_host(torch.ones(5), CUDA)
    assert gpu == ["copy 5"]


class Own(UserDict[str, torch.Tensor]):
    """A batch that moves itself."""

    def to(self, device: torch.device) -> Own:
        return Own({key: value.to(device) for key, value in self.items()})


def test_an_object_that_moves_itself_is_left_to_itself(gpu: list[str]) -> None:
    given = Own(x=torch.ones(2))
    assert pinned(given) is given
    copied = BatchCopies(CUDA)(given)
    assert copied is not given
    assert gpu == ["copy 2 and wait", "computing waits for side"]


def test_a_batch_on_a_cpu_is_copied_at_once() -> None:
    given = {"x": torch.ones(2)}
    copied = BatchCopies(CPU)(given)
    assert copied["x"].data_ptr() != given["x"].data_ptr()


@pytest.fixture
def events(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same GPU, with events; what it is told about them is in the same list."""
    computing = torch.cuda.current_stream(CUDA)
    computing.wait_event = lambda event: gpu.append(f"computing waits for {event.name}")  # type: ignore[assignment]

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            name="copies",
            wait_stream=lambda other: gpu.append(f"copies wait for {other.name}"),
            record_event=lambda event: gpu.append("event") or event,
        )

    def event(**settings: bool) -> SimpleNamespace:
        return SimpleNamespace(name="the event", synchronize=lambda: gpu.append(f"host waits {settings}"))

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", event)
    return gpu


def test_a_change_of_the_state_waits_on_the_gpu_for_its_copies(events: list[str]) -> None:
    copies = StateCopies(CUDA)
    rooms = [torch.zeros(2), torch.zeros(3)]
    wait = copies.copy([torch.ones(2), torch.ones(3)], rooms)
    assert copies.pinned
    assert events == ["copies wait for computing", "on copies", "off copies", "event"]
    assert [room.tolist() for room in rooms] == [[1.0] * 2, [1.0] * 3]
    events.clear()
    copies.before_change()
    copies.before_change()
    assert events == ["computing waits for the event"]
    wait()
    assert events[1:] == ["host waits {'blocking': True}"]


def test_on_a_cpu_a_copy_is_complete_at_once() -> None:
    copies, room = StateCopies(CPU), torch.zeros(2)
    copies.copy([torch.ones(2)], [room])
    copies.before_change()
    assert room.tolist() == [1.0, 1.0]
    assert not copies.pinned
