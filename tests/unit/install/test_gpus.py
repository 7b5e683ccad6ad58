"""What the checks of GPUs say, by the versions and sums that NVML and torch report. None of it needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain_plus.install.gpus import TERMS, NvmlReport, TorchReport, gpu_checks

SUM = TERMS * (TERMS + 1) / 2
H100 = "NVIDIA H100 80GB HBM3"
NODE = NvmlReport(driver="580.95.05", gpus=(H100,) * 4, nvlink_pairs=6)
TORCH = TorchReport(version="2.13.0", cuda="13.0", nccl="2.29.7", devices=4, sums=(SUM,) * 4, gathered=(SUM,) * 4)
CPU = TorchReport(version="2.13.0+cpu")


def said(nvml: NvmlReport | None, torch: TorchReport | None) -> dict[str, str]:
    return {check.name: f"{check.status}  {check.detail}" for check in gpu_checks(nvml, torch)}


def test_a_sound_node() -> None:
    checks = gpu_checks(NODE, TORCH)
    assert [line for check in checks for line in check.lines()] == [
        f"PASS  GPUs: 4 x {H100}",
        "PASS  NVIDIA driver: 580.95.05; CUDA 13.0 needs 580 or newer",
        "PASS  CUDA: 13.0, for which torch 2.13.0 is built",
        "PASS  NCCL: 2.29.7",
        "PASS  GPU links: NVLink between all GPUs",
        "PASS  sum over GPUs: right on 4 GPUs",
    ]


def test_a_machine_without_gpus_says_at_most_one_line() -> None:
    assert gpu_checks(None, None) == gpu_checks(None, CPU) == []
    assert gpu_checks(None, TorchReport(fault="it did not load")) == []
    without = replace(TORCH, devices=0, sums=(), gathered=())
    assert said(None, without) == {"GPUs": "PASS  none here; torch 2.13.0 is built for CUDA 13.0"}


def test_gpus_that_torch_cannot_use() -> None:
    [check] = gpu_checks(NODE, CPU)
    assert check.lines()[0] == f"WARN  GPUs: 4 x {H100}; torch cannot use GPUs: 2.13.0+cpu is a CPU build"
    [check] = gpu_checks(NODE, TorchReport(fault="libcudart.so.13: cannot open shared object file"))
    assert check.detail.endswith("torch cannot use GPUs: libcudart.so.13: cannot open shared object file")
    assert said(NODE, None) == {"GPUs": f"PASS  4 x {H100}", "NVIDIA driver": "PASS  580.95.05"}
    hidden = replace(TORCH, devices=0, sums=(), gathered=())
    assert said(NODE, hidden)["GPUs"] == f"FAIL  4 x {H100}; torch can use none of them"
    assert "sum over GPUs" not in said(NODE, hidden)
    some = replace(TORCH, devices=1, sums=(SUM,), gathered=(SUM,))
    assert said(NODE, some)["GPUs"] == f"WARN  4 x {H100}; torch can use 1"
    assert said(NODE, some)["sum over GPUs"] == "PASS  right on 1 GPU"


@pytest.mark.parametrize(
    ("driver", "cuda", "expected"),
    [
        ("580.65.06", "13.0", "PASS  580.65.06; CUDA 13.0 needs 580 or newer"),
        ("570.172.08", "13.0", "FAIL  570.172.08 is too old: CUDA 13.0 needs 580 or newer"),
        ("570.172.08", "12.8", "PASS  570.172.08; CUDA 12.8 needs 525 or newer"),
        ("520.61.05", "12.6", "FAIL  520.61.05 is too old: CUDA 12.6 needs 525 or newer"),
        ("700.1", "14.0", "PASS  700.1; the oldest for CUDA 14.0 is not known here"),
    ],
)
def test_the_driver_against_cuda(driver: str, cuda: str, expected: str) -> None:
    """If the driver is too old, torch still counts the GPUs; their first use fails."""
    too_old = expected.startswith("FAIL")
    torch = replace(TORCH, cuda=cuda, **({"fault": "driver too old", "sums": (), "gathered": ()} if too_old else {}))
    seen = said(replace(NODE, driver=driver), torch)
    assert seen["NVIDIA driver"] == expected
    assert seen["sum over GPUs"] == ("FAIL  4 GPUs: driver too old" if too_old else "PASS  right on 4 GPUs")


def test_an_old_driver_with_which_the_gpus_work_is_a_warning() -> None:
    seen = said(replace(NODE, driver="570.172.08"), TORCH)
    assert seen["NVIDIA driver"] == ("WARN  570.172.08; CUDA 13.0 needs 580 or newer, but torch can use the GPUs")


@pytest.mark.parametrize(
    ("gpus", "pairs", "expected"),
    [
        (4, 6, "PASS  NVLink between all GPUs"),
        (4, 2, "PASS  NVLink between 2 of 6 pairs of GPUs, others by PCIe"),
        (4, 0, "PASS  PCIe"),
        (4, None, "PASS  unknown: NVML does not report them"),
        (1, 0, None),
    ],
)
def test_links(gpus: int, pairs: int | None, expected: str | None) -> None:
    node = NvmlReport(driver="580.95.05", gpus=("NVIDIA L4",) * gpus, nvlink_pairs=pairs)
    assert said(node, TORCH).get("GPU links") == expected


def test_wrong_sums_name_the_gpu() -> None:
    wrong = replace(TORCH, sums=(SUM, SUM, SUM + 1, SUM))
    assert said(NODE, wrong)["sum over GPUs"] == "FAIL  wrong on GPU 2"
    copied = replace(TORCH, gathered=(SUM, 0.0, SUM, float("nan")))
    assert said(NODE, copied)["sum over GPUs"] == "FAIL  wrong after copies from GPU 1, GPU 3 to GPU 0"


def test_nvml_and_nccl_that_do_not_work() -> None:
    assert said(NvmlReport(fault="Driver/library version mismatch"), TORCH) == {
        "GPUs": "WARN  NVML does not work: Driver/library version mismatch"
    }
    assert said(NODE, replace(TORCH, nccl=None))["NCCL"] == "PASS  this torch has none"
