"""Whether a Horovod may be used is decided by its version and torch's, and wrong ones are told apart."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from raytrain_plus.install import state
from raytrain_plus.install.state import HorovodState, fixed_version, horovod_state


@pytest.mark.parametrize(
    ("horovod", "torch", "usable", "reason"),
    [
        (fixed_version("2.13.0+cpu"), "2.13.0+cpu", True, "raytrain"),
        (fixed_version("2.13.0+cpu"), "2.14.0", False, "is for another torch than 2.14.0"),
        ("0.28.1", "2.13.0+cpu", False, "lacks fixes"),
        (None, "2.13.0+cpu", False, "horovod is not installed"),
    ],
)
def test_a_build_is_for_one_torch(
    monkeypatch: pytest.MonkeyPatch, horovod: str | None, torch: str, usable: bool, reason: str
) -> None:
    def version(name: str) -> str:
        found = {"horovod": horovod, "torch": torch}[name]
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(state, "version", version)
    found = horovod_state()
    assert (found.usable, reason in found.reason) == (usable, True)
    assert found.remedy == ("" if usable else "raytrain install-horovod")


def test_auto_takes_torch_where_horovod_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "horovod_state", lambda: HorovodState(False, "it is not installed", "x"))
    assert state.choose_collective("auto", 2) == "torch"
    monkeypatch.setattr(state, "horovod_state", lambda: HorovodState(True, "it is", ""))
    assert state.choose_collective("auto", 2) == "horovod"
