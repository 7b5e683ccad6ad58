"""The checks name what is missing with the exact command that fixes it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from raytrain_plus.install import doctor, horovod
from raytrain_plus.install.state import HorovodState


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
