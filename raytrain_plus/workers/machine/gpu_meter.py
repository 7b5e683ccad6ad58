"""Read how much a worker's GPU is used, through NVML, every few seconds and on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, TypeVar

from raytrain_plus.observe.gpu_use import GpuUse

PERIOD_S = 5.0
"""Seconds between two readings."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@contextlib.contextmanager
def metered(uuid: str, tell: Callable[[GpuUse], None], nvml: Any = None) -> Iterator[None]:
    """Give readings of the GPU of this UUID to `tell`, from a thread, while in this context.

    If they cannot be read, that is logged once. `nvml`: the module `pynvml`, which is loaded if it is not given.
    """
    over = threading.Event()
    threading.Thread(target=_read_until, args=(over, uuid, tell, nvml), name="gpu meter", daemon=True).start()
    try:
        yield
    finally:
        # Not joined: a driver in trouble can hold a call for minutes, and the training must not wait for it.
        over.set()


def _read_until(over: threading.Event, uuid: str, tell: Callable[[GpuUse], None], nvml: Any) -> None:
    try:
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
            while True:
                tell(read(nvml, gpu))
                if over.wait(PERIOD_S):
                    return
        finally:
            nvml.nvmlShutdown()
    # The run needs none of this.
    except Exception as error:
        log.warning("the use of %s cannot be read: %s", uuid, error)


def read(nvml: Any, gpu: Any) -> GpuUse:
    """Return a reading of a GPU, given its handle."""
    utilisation = _of(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)
    memory_bytes = _of(nvml, lambda: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used))
    power_w = _of(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
    return GpuUse(utilisation=utilisation, memory_bytes=memory_bytes, power_w=power_w)


def _of(nvml: Any, figure: Callable[[], T]) -> T | None:
    """Return one figure; None if this kind of GPU does not have it."""
    try:
        return figure()
    except nvml.NVMLError_NotSupported:
        return None
