"""A worker's GPU is read on a thread of its own, which nothing waits for. NVML is a stand-in here."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import pytest

from raytrain_plus.observe.gpu_use import GpuUse
from raytrain_plus.workers.machine import gpu_meter
from raytrain_plus.workers.machine.gpu_meter import metered, read
from tests.unit.fake_nvml import FakeNvml, NVMLError, NVMLErrorNotSupported

USE = GpuUse(utilisation=0.91, memory_bytes=2 * 10**9, power_w=71.5)


def ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "gpu meter":
            thread.join(5)
            assert not thread.is_alive()


def test_the_gpu_of_that_uuid_is_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_meter, "PERIOD_S", 0.01)
    nvml, told = FakeNvml(["NVIDIA L4"] * 2), queue.SimpleQueue[Any]()
    with metered("GPU-1", lambda use: told.put((threading.current_thread().name, use)), nvml):
        assert [told.get(timeout=5) for _ in range(3)] == [("gpu meter", USE)] * 3
        assert nvml.started == 1
    ended()
    assert nvml.started == 0


def test_figures_that_a_gpu_does_not_have_are_none() -> None:
    missing = {"nvmlDeviceGetPowerUsage": NVMLErrorNotSupported(), "nvmlDeviceGetMemoryInfo": NVMLErrorNotSupported()}
    assert read(FakeNvml(raises=missing), 1) == GpuUse(utilisation=0.91, memory_bytes=None, power_w=None)
    with pytest.raises(NVMLError, match="GPU is lost"):
        read(FakeNvml(raises={"nvmlDeviceGetPowerUsage": NVMLError("GPU is lost")}), 1)


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetUtilizationRates"])
def test_a_gpu_that_cannot_be_read_is_logged_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    nvml, told = FakeNvml(raises={name: NVMLError("Unknown Error")}), queue.SimpleQueue[Any]()
    with caplog.at_level(logging.WARNING), metered("GPU-0", told.put, nvml):
        ended()
    assert caplog.messages == ["the use of GPU-0 cannot be read: Unknown Error"]
    assert told.empty()
    assert nvml.started == 0


def test_nothing_waits_for_a_driver_that_hangs() -> None:
    hangs = threading.Event()

    class Hanging(FakeNvml):
        def nvmlInit(self) -> None:
            hangs.wait(60)

    with metered("GPU-0", lambda use: None, Hanging()):
        pass
    assert [thread.name for thread in threading.enumerate()].count("gpu meter") == 1
    hangs.set()
    ended()
