"""The checks name what is missing with the exact command that fixes it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from raytrain_plus.install import doctor, horovod
from raytrain_plus.install.gpus import NvmlReport, TorchReport
from raytrain_plus.install.horovod_usable import HorovodState


def found() -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.remedy) for check in doctor.checks()}


def test_missing_or_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "ray":
            raise PackageNotFoundError(name)
        return {"torch": "2.9.1+cpu", "pyarrow": "26.0.1", "numpy": "2.4.6"}[name]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "probe", lambda: HorovodState(True, "it is there", ""))
    seen = found()
    assert seen["ray"] == ("FAIL", "pip install 'ray>=2.55'")
    assert seen["torch"] == ("FAIL", "pip install 'torch>=2.10'")
    assert seen["pyarrow"] == ("PASS", "")
    assert seen["Horovod"] == ("PASS", "")


def test_horovod_and_missing_build_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: HorovodState(False, "it is not installed", "raytrain install-horovod"))
    monkeypatch.setattr(horovod.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    remedies = [check.remedy for check in doctor.checks() if check.status == "WARN"]
    assert remedies[:4] == [
        "raytrain install-horovod",
        "apt-get install g++ (Fedora: dnf install gcc-c++)",
        "apt-get install cmake (Fedora: dnf install cmake)",
        "apt-get install make",
    ]


@pytest.mark.parametrize(("build", "asked"), [("2.13.0+cpu", False), ("2.13.0+cu130", True), ("2.13.0", True)])
@pytest.mark.parametrize("node", [None, NvmlReport(driver="580.95.05", gpus=("NVIDIA L4",), nvlink_pairs=0)])
def test_torch_is_loaded_only_if_it_or_the_machine_has_to_do_with_gpus(
    monkeypatch: pytest.MonkeyPatch, build: str, asked: bool, node: NvmlReport | None
) -> None:
    loaded: list[str] = []

    def probe_torch() -> TorchReport:
        loaded.append(build)
        return TorchReport(version=build, cuda=None if build.endswith("+cpu") else "13.0")

    monkeypatch.setattr(doctor, "version", lambda name: build)
    monkeypatch.setattr(doctor, "probe_nvml", lambda: node)
    monkeypatch.setattr(doctor, "probe_torch", probe_torch)
    names = [check.name for check in doctor._gpus()]
    assert bool(loaded) == (asked or node is not None)
    assert ("GPUs" in names) == bool(loaded)


def test_gpus_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "probe_nvml", lambda: NvmlReport(driver="580.95.05", gpus=("NVIDIA L4",)))
    assert [check.lines() for check in doctor._gpus()] == [
        ["PASS  GPUs: 1 x NVIDIA L4"],
        ["PASS  NVIDIA driver: 580.95.05"],
    ]
