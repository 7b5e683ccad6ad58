"""Recognise that a device has failed: no process that used it can use it again, whatever raised the error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import ray
import torch
from ray.exceptions import RayError

from raytrain_plus.errors import DeviceBroken, RaytrainError
from raytrain_plus.workers.machine.gpu import gpu_of

GRACE_S = 10.0
"""Seconds in which the controller can hear of a broken device before the process ends itself."""
_SAID = ("CUDA error", "CUDNN_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_EXECUTION_FAILED", "uncorrectable ECC error")
"""Texts by which errors of other types report that a device has failed."""
_USABLE = (
    *("out of memory", "ALLOC_FAILED", "no kernel image", "invalid device ordinal", "invalid configuration argument"),
    *("driver version is insufficient", "no CUDA-capable device"),
)
"""Texts of memory that has run out, and of mistakes: the device can be used again, or never could."""


def device_fault(error: BaseException, device: torch.device) -> str:
    """Return what this process's device has said as it failed, in one line; empty if the error is another one.

    Memory that has run out is no such fault, nor is what others report of theirs, nor what a GPU works after.
    """
    fault = _said(error)
    return "" if fault and _works(device) else fault


def _works(device: torch.device) -> bool:
    """Return whether a GPU still computes. A CPU cannot be asked."""
    if device.type != "cuda":
        return False
    try:
        return bool(torch.ones(1, device=device).add(1).item() == 2)
    except RuntimeError:
        return False


def _said(error: BaseException) -> str:
    for one in _causes(error):
        text = str(one).strip()
        if isinstance(one, (torch.OutOfMemoryError, RaytrainError, RayError)) or any(said in text for said in _USABLE):
            return ""
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
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)


def device_name(device: torch.device) -> str:
    """Return a GPU's model and UUID, or what Ray calls it if it does not answer; empty for a CPU."""
    try:
        gpu = gpu_of(device)
    except RuntimeError:
        numbers = ", ".join(map(str, ray.get_gpu_ids()))
        return f"GPU {numbers} of node {ray.get_runtime_context().get_node_id()[:12]}"
    return "" if gpu is None else str(gpu)


class Brokenness:
    """Ends this process once its device has failed."""

    def __init__(
        self, hear: Callable[[DeviceBroken], None] = lambda error: None, end: Callable[[], None] = lambda: os._exit(1)
    ) -> None:
        """`hear`: tells the controller; `end`: ends the process."""
        self._hear = hear
        self._end = end

    def tell(self, error: DeviceBroken) -> NoReturn:
        """Tell of the failure, and never return: nothing that this thread could answer is of use any more."""
        self._hear(error)
        # The controller ends this process as soon as it has heard of it.
        threading.Event().wait(GRACE_S)
        self._end()
        raise error
