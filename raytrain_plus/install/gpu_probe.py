"""Read what NVML and torch report of this machine's GPUs; `gpus` judges it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from raytrain_plus.install.gpus import TERMS, NvmlReport, TorchReport

PROBE_S = 120.0
"""Maximum seconds for torch to load and to use all GPUs."""

# In a process of its own: a driver that fails may end it, and torch takes seconds to load.
_PROBE = """
import dataclasses, json, torch
from raytrain_plus.install.gpu_probe import read_torch
print(json.dumps(dataclasses.asdict(read_torch(torch))))
"""


def probe_nvml() -> NvmlReport | None:
    """Return what NVML reports; None if it is not installed, or finds no GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    return read_nvml(pynvml)


def read_nvml(nvml: Any) -> NvmlReport | None:
    """Return what NVML reports, given the module `pynvml`."""
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return None
    except nvml.NVMLError as error:
        return NvmlReport(fault=str(error))
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        if not handles:
            return None
        return NvmlReport(
            driver=nvml.nvmlSystemGetDriverVersion(),
            gpus=tuple(nvml.nvmlDeviceGetName(handle) for handle in handles),
            nvlink_pairs=_nvlink_pairs(nvml, handles),
        )
    except nvml.NVMLError as error:
        return NvmlReport(fault=str(error))
    finally:
        nvml.nvmlShutdown()


def _nvlink_pairs(nvml: Any, handles: Sequence[Any]) -> int | None:
    """Return how many pairs of GPUs NVLink connects, directly or through switches; None if NVML cannot tell."""
    try:
        states = [
            nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            for one, other in combinations(handles, 2)
        ]
    except nvml.NVMLError:
        return None
    return states.count(nvml.NVML_P2P_STATUS_OK)


def probe_torch() -> TorchReport:
    """Return what torch reports, in a process of its own; takes seconds."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return TorchReport(fault=f"it did not answer within {PROBE_S:g} s")
    if done.returncode:
        return TorchReport(fault=(done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    return TorchReport(**{**found, "sums": tuple(found["sums"]), "gathered": tuple(found["gathered"])})


def read_torch(torch: Any) -> TorchReport:
    """Return what torch reports, given the module `torch`; sums on each GPU that it can use."""
    version, cuda = str(torch.__version__), torch.version.cuda
    if cuda is None:
        return TorchReport(version=version)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    devices, fault = 0, ""
    sums: list[float] = []
    gathered: list[float] = []
    try:
        devices = torch.cuda.device_count()
        if devices:
            sums, gathered = sums_on(torch, [f"cuda:{number}" for number in range(devices)])
    # torch raises many kinds of errors here, and the line of the check says which.
    except Exception as error:
        fault = (str(error).splitlines() or [type(error).__name__])[0]
    return TorchReport(
        version=version,
        cuda=cuda,
        nccl=nccl,
        devices=devices,
        sums=tuple(sums),
        gathered=tuple(gathered),
        fault=fault,
    )


def sums_on(torch: Any, devices: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return the sum of 1 to `TERMS` on each device, and on the first one of what is copied there from each."""
    numbers = [torch.arange(1, TERMS + 1, dtype=torch.float64, device=device) for device in devices]
    gathered = [each.to(devices[0]) for each in numbers]
    return [float(each.sum()) for each in numbers], [float(each.sum()) for each in gathered]
