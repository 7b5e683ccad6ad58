"""Judge what NVML and torch report of this machine's NVIDIA GPUs. Pure: versions in, checks out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from raytrain_plus.install.check import Check

DRIVER_FLOOR = {12: 525, 13: 580}
"""The oldest major version of NVIDIA's driver that runs each major version of CUDA."""
TERMS = 2**20
"""Each GPU adds 1, 2, ... up to this number; float64 holds the sum exactly."""

_INSTALL_TORCH = "install torch's CUDA build, as 'Start Locally' on pytorch.org says"


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmlReport:
    """What NVML reports of this machine."""

    driver: str = ""
    """The driver's version, such as `580.95.05`; empty if NVML does not work."""
    gpus: tuple[str, ...] = ()
    """The name of each GPU."""
    nvlink_pairs: int | None = None
    """How many pairs of GPUs NVLink connects; None if NVML cannot tell."""
    fault: str = ""
    """Why NVML does not work although it is installed; empty if it works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchReport:
    """The report of torch, made in a process of its own."""

    version: str = ""
    cuda: str | None = None
    """The version of CUDA that it was built for; None for a CPU build."""
    nccl: str | None = None
    """The version of NCCL; None if it has none."""
    devices: int = 0
    """How many GPUs it can use."""
    sums: tuple[float, ...] = ()
    """The sum of 1 to `TERMS` as each GPU computes it."""
    gathered: tuple[float, ...] = ()
    """The sum of the same numbers, copied from each GPU to the first one."""
    fault: str = ""
    """The error; empty if there was none."""


def gpu_checks(nvml: NvmlReport | None, torch: TorchReport | None) -> list[Check]:
    """Return the checks of the GPUs; none on a machine without GPUs whose torch is a CPU build.

    `nvml`: None if it is not installed, or finds no GPU. `torch`: None if it is not installed, or was not asked.
    """
    if nvml is None:
        return _without_gpus(torch)
    if nvml.fault:
        remedy = "nvidia-smi shows more; after an update of the driver, restart the machine"
        return [Check("GPUs", "WARN", f"NVML does not work: {nvml.fault}", remedy)]
    if torch is None:
        return [Check("GPUs", "PASS", counted(nvml.gpus)), Check("NVIDIA driver", "PASS", nvml.driver)]
    if torch.cuda is None:
        lacks = f"{counted(nvml.gpus)}; torch cannot use GPUs: " + (torch.fault or f"{torch.version} is a CPU build")
        return [Check("GPUs", "WARN", lacks, _INSTALL_TORCH)]
    return [
        _count(nvml, torch),
        _driver(nvml.driver, torch),
        Check("CUDA", "PASS", f"{torch.cuda}, for which torch {torch.version} is built"),
        # Runs sum through the hosts' memory, and do without it.
        Check("NCCL", "PASS", torch.nccl or "this torch has none"),
        *_links(nvml),
        *_sums(torch),
    ]


def counted(names: tuple[str, ...]) -> str:
    """Return how many GPUs of each name there are, as text.

    >>> counted(("NVIDIA L4", "NVIDIA L4")), counted(("NVIDIA L4", "Tesla T4"))
    ('2 x NVIDIA L4', '1 x NVIDIA L4, 1 x Tesla T4')
    """
    return ", ".join(f"{len(list(same))} x {name}" for name, same in groupby(sorted(names)))


def driver_floor(cuda: str) -> int | None:
    """Return the oldest major version of the driver that runs this version of CUDA; None if it is not known here.

    >>> driver_floor("13.0"), driver_floor("12.8"), driver_floor("14.1")
    (580, 525, None)
    """
    return DRIVER_FLOOR.get(int(cuda.partition(".")[0]))


def _without_gpus(torch: TorchReport | None) -> list[Check]:
    if torch is None or torch.cuda is None:
        return []
    return [Check("GPUs", "PASS", f"none here; torch {torch.version} is built for CUDA {torch.cuda}")]


def _count(nvml: NvmlReport, torch: TorchReport) -> Check:
    found = counted(nvml.gpus)
    if not torch.devices:
        remedy = "see the driver's line; or CUDA_VISIBLE_DEVICES hides them"
        return Check("GPUs", "FAIL", f"{found}; torch can use none of them" + _because(torch.fault), remedy)
    if torch.devices < len(nvml.gpus):
        return Check("GPUs", "WARN", f"{found}; torch can use {torch.devices}", "unset CUDA_VISIBLE_DEVICES")
    return Check("GPUs", "PASS", found)


def _driver(driver: str, torch: TorchReport) -> Check:
    assert torch.cuda is not None, "a CUDA build"
    floor = driver_floor(torch.cuda)
    if floor is None:
        return Check("NVIDIA driver", "PASS", f"{driver}; the oldest for CUDA {torch.cuda} is not known here")
    needs = f"CUDA {torch.cuda} needs {floor} or newer"
    if int(driver.partition(".")[0]) >= floor:
        return Check("NVIDIA driver", "PASS", f"{driver}; {needs}")
    remedy = f"install a driver of version {floor} or newer, or a torch for an older CUDA"
    if _right(torch):
        # NVIDIA's compatibility packages let an older driver run a newer CUDA on GPUs of data centres.
        return Check("NVIDIA driver", "WARN", f"{driver}; {needs}, but torch can use the GPUs", remedy)
    return Check("NVIDIA driver", "FAIL", f"{driver} is too old: {needs}", remedy)


def _links(nvml: NvmlReport) -> Iterator[Check]:
    count = len(nvml.gpus)
    pairs = count * (count - 1) // 2
    if not pairs:
        return
    if nvml.nvlink_pairs is None:
        yield Check("GPU links", "PASS", "unknown: NVML does not report them")
    elif nvml.nvlink_pairs == pairs:
        yield Check("GPU links", "PASS", "NVLink between all GPUs")
    elif nvml.nvlink_pairs:
        yield Check("GPU links", "PASS", f"NVLink between {nvml.nvlink_pairs} of {pairs} pairs of GPUs, others by PCIe")
    else:
        yield Check("GPU links", "PASS", "PCIe")


def _sums(torch: TorchReport) -> Iterator[Check]:
    if not torch.devices:
        return
    count = f"{torch.devices} GPU{'' if torch.devices == 1 else 's'}"
    if torch.fault:
        yield Check("sum over GPUs", "FAIL", f"{count}: {torch.fault}", "nvidia-smi, dmesg: look for Xid errors")
    elif _right(torch):
        yield Check("sum over GPUs", "PASS", f"right on {count}")
    elif wrong := _wrong(torch.sums):
        yield Check("sum over GPUs", "FAIL", f"wrong on {wrong}", "nvidia-smi -q -d ECC; replace the GPU")
    else:
        what = f"wrong after copies from {_wrong(torch.gathered)} to GPU 0"
        remedy = "NCCL_P2P_DISABLE=1; or switch off the machine's IOMMU and PCIe ACS, with which such copies fail"
        yield Check("sum over GPUs", "FAIL", what, remedy)


def _right(torch: TorchReport) -> bool:
    whole = len(torch.sums) == len(torch.gathered) == torch.devices > 0
    return whole and not torch.fault and not _wrong(torch.sums) and not _wrong(torch.gathered)


def _wrong(sums: tuple[float, ...]) -> str:
    """Return the GPUs whose sum is wrong, as text; empty if none is."""
    expected = TERMS * (TERMS + 1) / 2
    return ", ".join(f"GPU {number}" for number, found in enumerate(sums) if found != expected)


def _because(fault: str) -> str:
    return f": {fault}" if fault else ""
