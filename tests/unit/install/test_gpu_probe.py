"""NVML and torch are read through stand-ins for both modules; the sums are made by torch itself, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytrain_plus.install import gpu_probe
from raytrain_plus.install.gpu_probe import probe_torch, read_nvml, read_torch, sums_on
from raytrain_plus.install.gpus import TERMS, NvmlReport, TorchReport
from tests.unit.fake_nvml import FakeNvml, NVMLError, NVMLErrorDriverNotLoaded, NVMLErrorLibraryNotFound

SUM = TERMS * (TERMS + 1) / 2


def test_what_nvml_reports() -> None:
    nvml = FakeNvml(["NVIDIA A100"] * 3, linked=[(0, 1), (1, 2)])
    assert read_nvml(nvml) == NvmlReport(driver="580.95.05", gpus=("NVIDIA A100",) * 3, nvlink_pairs=2)
    assert nvml.started == 0
    silent = FakeNvml(["NVIDIA L4"] * 2, raises={"nvmlDeviceGetP2PStatus": NVMLError("Not Supported")})
    assert read_nvml(silent) == NvmlReport(driver="580.95.05", gpus=("NVIDIA L4",) * 2, nvlink_pairs=None)


@pytest.mark.parametrize("error", [NVMLErrorLibraryNotFound(), NVMLErrorDriverNotLoaded()])
def test_a_machine_without_a_driver_or_gpus(error: Exception) -> None:
    assert read_nvml(FakeNvml(raises={"nvmlInit": error})) is None
    assert read_nvml(FakeNvml([])) is None


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlSystemGetDriverVersion"])
def test_nvml_that_fails(name: str) -> None:
    nvml = FakeNvml(raises={name: NVMLError("Driver/library version mismatch")})
    assert read_nvml(nvml) == NvmlReport(fault="Driver/library version mismatch")
    assert nvml.started == 0


def test_each_device_sums_and_the_first_one_sums_what_is_copied() -> None:
    assert sums_on(torch, ["cpu", "cpu"]) == ([SUM, SUM], [SUM, SUM])


def built_for_cuda(devices: int, arange: Any = None) -> SimpleNamespace:
    """Return a stand-in for a CUDA build of torch, whose devices compute on the CPU."""

    def made(*bounds: int, dtype: torch.dtype, device: str) -> SimpleNamespace:
        values = torch.arange(*bounds, dtype=dtype)
        return SimpleNamespace(sum=values.sum, to=lambda device: values)

    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 29, 7)), device_count=lambda: devices),
        distributed=SimpleNamespace(is_nccl_available=lambda: True),
        float64=torch.float64,
        arange=arange or made,
    )


def test_what_torch_reports() -> None:
    found = TorchReport(version="2.13.0", cuda="13.0", nccl="2.29.7", devices=2, sums=(SUM,) * 2, gathered=(SUM,) * 2)
    assert read_torch(built_for_cuda(2)) == found
    assert read_torch(built_for_cuda(0)) == TorchReport(version="2.13.0", cuda="13.0", nccl="2.29.7")


def test_a_gpu_that_torch_cannot_use_is_a_fault() -> None:
    def fails(*bounds: int, dtype: torch.dtype, device: str) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    found = read_torch(built_for_cuda(2, fails))
    assert (found.devices, found.sums) == (2, ())
    assert found.fault == "The NVIDIA driver on your system is too old"


def test_the_torch_of_this_machine_is_read_in_a_process() -> None:
    found = probe_torch()
    assert (found.version, found.cuda, found.fault) == (torch.__version__, torch.version.cuda, "")


def test_a_process_that_fails_or_hangs_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "_PROBE", "import sys; sys.exit('it broke')")
    assert probe_torch() == TorchReport(fault="it broke")
    monkeypatch.setattr(gpu_probe, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(gpu_probe, "PROBE_S", 0.05)
    assert probe_torch() == TorchReport(fault="it did not answer within 0.05 s")
