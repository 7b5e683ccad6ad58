"""Recognise that a device has failed: no process that used it can use it again, whatever raised the error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from raytrain_plus.errors import DeviceBroken

GRACE_S = 10.0
"""Seconds in which the controller can hear of a broken device before the process ends itself."""
_SAID = ("CUDA error", "CUDNN_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_EXECUTION_FAILED", "uncorrectable ECC error")
"""What libraries say of a device in errors of other types."""


def device_fault(error: BaseException) -> str:
    """Return what a device has said as it failed, in one line; empty if the error is another one.

    Memory that has run out is no such fault: the device can be used again.
    """
    for one in _causes(error):
        if isinstance(one, torch.OutOfMemoryError):
            return ""
        text = str(one).strip()
        if isinstance(one, torch.AcceleratorError) or (
            isinstance(one, RuntimeError) and any(said in text for said in _SAID)
        ):
            return text.splitlines()[0] if text else type(one).__name__
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that led to it."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield now
        now = now.__cause__ or now.__context__


def device_name(device: torch.device) -> str:
    """Return a GPU's model and UUID; empty for a CPU."""
    if device.type != "cuda":
        return ""
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} (GPU-{found.uuid})"


class Brokenness:
    """Whether the device of this process has failed."""

    def __init__(self, end: Callable[[], None] = lambda: os._exit(1)) -> None:
        """`end`: ends the process."""
        self._end = end
        self._told = threading.Event()
        self._error: DeviceBroken | None = None

    def wait(self) -> NoReturn:
        """Wait until the device has failed, then raise that."""
        self._told.wait()
        assert self._error is not None, "it was told"
        raise self._error

    def tell(self, error: DeviceBroken) -> NoReturn:
        """Tell whoever waits, and never return: nothing that this thread could answer is of use any more."""
        self._error = error
        self._told.set()
        # The controller ends this process as soon as it has heard of it.
        threading.Event().wait(GRACE_S)
        self._end()
        raise error
