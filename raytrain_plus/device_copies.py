"""Copies between the host and its device: few, together, and beside the computation.

A copy from a GPU makes the host wait until the GPU has done all earlier work, and the GPU then waits until the host has
requested more. So a step reads what it must know at one place, with `read_together`. What goes to a GPU is copied from
pinned memory, from which the GPU fetches it by itself. On a CPU all of this is the same, and costs nothing.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy as shallow
from copy import deepcopy
from typing import Any

import torch


class Numbers:
    """Some numbers of a device, which the host reads when it first needs them."""

    __slots__ = ("on_device", "read")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Take a tensor of any shape, of real numbers that float64 can hold; it must not change until it is read."""
        self.on_device = tensor.detach().reshape(-1)
        self.read: torch.Tensor | None = None
        """The same numbers on the host, in float64, once they are read."""

    def host(self) -> torch.Tensor:
        """Return the numbers on the host, as a flat float64 tensor."""
        if self.read is None:
            read_together([self])
        assert self.read is not None, "it has just been read"
        return self.read

    def values(self) -> list[float]:
        """Return the numbers."""
        found: list[float] = self.host().tolist()
        return found


def read_together(numbers: Iterable[Numbers]) -> None:
    """Read all of these numbers that have not been read, with one copy for each device."""
    of_devices: dict[torch.device, list[Numbers]] = defaultdict(list)
    for one in numbers:
        if one.read is None:
            of_devices[one.on_device.device].append(one)
    for found in of_devices.values():
        joined = to_host(torch.cat([one.on_device.to(torch.float64) for one in found]))
        for one, host in zip(found, joined.split([len(one.on_device) for one in found]), strict=True):
            one.read = host


def release_memory(device: torch.device) -> None:
    """Give back to the device what torch has kept of its memory for later."""
    # Tensors may be in cycles, with the frames that an error came from.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host. The host waits for its device."""
    return tensor.cpu()


def host_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor in memory of the host that copies to and from `device` need not wait for."""
    return host_room(tensor.shape, tensor.dtype, device).copy_(tensor.detach())


def host_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return such memory, with undefined values."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def from_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device. Neither waits for the other."""
    if device.type != "cuda":
        return tensor.to(device)
    # Pinned memory is not used again before this copy has ended: torch's allocator sees to that.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device(batch: Any, device: torch.device, copy: bool = False) -> Any:
    """Return `batch` with every tensor on `device`; with `copy`, all tensors are new.

    Searches dicts, lists and tuples; other objects are moved by their own `to` method if they have one.
    """
    if device.type == "cpu" and not copy:
        return batch

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if copy and tensor.device == device:
            return tensor.clone()
        return tensor.to(device, non_blocking=True, copy=copy)

    # A class such as a tokenizer's batch can move itself.
    return _each(batch, moved, lambda value: (deepcopy(value) if copy else value).to(device))


def pinned(batch: Any) -> Any:
    """Return `batch` with every tensor of the host in pinned memory, from which a GPU fetches it by itself.

    Objects with a `to` method are pinned by their own `pin_memory` method, or left as they are.
    """
    return _each(
        batch,
        lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor,
        lambda value: value.pin_memory() if hasattr(value, "pin_memory") else value,
    )


def _each(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor], of_other: Callable[[Any], Any]) -> Any:
    """Return `batch` with each of its tensors, and each object that has a `to` method, replaced."""
    if isinstance(batch, torch.Tensor):
        return of_tensor(batch)
    if hasattr(batch, "to"):
        return of_other(batch)
    if isinstance(batch, dict):
        made = {key: _each(value, of_tensor, of_other) for key, value in batch.items()}
        if type(batch) is dict:
            return made
        same = shallow(batch)
        same.update(made)
        return same
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_each(value, of_tensor, of_other) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_each(value, of_tensor, of_other) for value in batch)
    return batch


class BatchCopies:
    """Copies batches to a device: to a GPU on a stream of its own, while the GPU computes.

    A step may be recomputed from the same batch and must give the same bits. A task that writes into its batch writes
    into a copy, whose memory layout does not depend on the source of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare to copy to `device`."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """Return a copy of a batch, which what is computed from now on can use."""
        stream = self._stream
        if stream is None:
            return to_device(batch, self._device, copy=True)
        computing = torch.cuda.current_stream(self._device)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            copy: torch.Tensor
            if not tensor.is_pinned():
                # The GPU cannot fetch it by itself.
                copy = to_device(tensor, self._device, copy=True)
                return copy
            with torch.cuda.stream(stream):
                copy = to_device(tensor, self._device, copy=True)
            # Its memory is used again only once what is computed with it has ended.
            copy.record_stream(computing)
            return copy

        found = _each(batch, copied, lambda value: to_device(value, self._device, copy=True))
        computing.wait_stream(stream)
        return found


class HostCopies:
    """Copies of single tensors to pinned memory and back, for an operation of the host (`collective.staged`)."""

    def __init__(self, device: torch.device) -> None:
        """Prepare to copy to and from `device`."""
        self._device = device
        self._copies = StateCopies(device)

    def apart(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device, not on the host."""
        return tensor.device.type != "cpu"

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Begin to copy a tensor, beside the computation; return the copy, and what waits until it is complete."""
        room = self.room(tensor)
        return room, self._copies.copy([tensor.detach()], [room])

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Return pinned memory for such a tensor."""
        return host_room(like.shape, like.dtype, self._device)

    def back(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy from pinned memory into a tensor; the device does it before what is requested from now on."""
        tensor.detach().copy_(host, non_blocking=True)


class StateCopies:
    """Copies of a state to the host, from a GPU on a stream of their own: only a change of the state waits for them."""

    def __init__(self, device: torch.device) -> None:
        """Prepare to copy what is on `device`, or on the host."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.cuda.Event | None = None
        """The end of the copies under way."""

    @property
    def pinned(self) -> bool:
        """Whether the memory for copies must be pinned."""
        return self._stream is not None

    def copy(self, sources: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin to copy each source into its room on the host; return a function that waits for the end.

        The sources must not change before `before_change` is called.
        """
        stream = self._stream
        if stream is None:
            for room, source in zip(rooms, sources, strict=True):
                room.copy_(source)
            return lambda: None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for room, source in zip(rooms, sources, strict=True):
                room.copy_(source, non_blocking=True)
                if source.device.type == "cuda":
                    # Its memory is not used again before the copy has ended, if the state is discarded meanwhile.
                    source.record_stream(stream)
        # Whoever waits for it sleeps.
        self._last = stream.record_event(torch.cuda.Event(blocking=True))
        wait: Callable[[], None] = self._last.synchronize
        return wait

    def before_change(self) -> None:
        """Let the GPU change the state only once the copies have ended; the host does not wait."""
        last, self._last = self._last, None
        if last is not None:
            torch.cuda.current_stream(self._device).wait_event(last)
