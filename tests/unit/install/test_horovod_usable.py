"""A Horovod is usable or not by its version and that of torch; each reason is named."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.install import horovod_usable
from raytrain_plus.install.edit import digest
from raytrain_plus.install.fixes import EDITS
from raytrain_plus.install.horovod_usable import HorovodState, fixed_version, horovod_state


@pytest.mark.parametrize(
    ("horovod", "torch", "usable", "reason"),
    [
        (fixed_version("2.13.0+cpu"), "2.13.0+cpu", True, "raytrain"),
        (fixed_version("2.13.0+cu130"), "2.13.0+cu130", True, "raytrain"),
        # Of an earlier version of this package.
        (f"{fixed_version('2.13.0+cu130')}.nccl", "2.13.0+cu130", False, "is for a torch other than"),
        (fixed_version("2.13.0+cpu"), "2.14.0", False, "is for a torch other than 2.14.0"),
        ("0.28.1", "2.13.0+cpu", False, "lacks fixes"),
        (None, "2.13.0+cpu", False, "horovod is not installed"),
    ],
)
def test_a_build_is_for_one_torch(
    monkeypatch: pytest.MonkeyPatch, horovod: str | None, torch: str, usable: bool, reason: str
) -> None:
    show(monkeypatch, horovod, torch)
    monkeypatch.setattr(horovod_usable, "_compiled_part_is_there", lambda: True)
    found = horovod_state()
    assert (found.usable, reason in found.reason) == (usable, True)
    assert found.remedy == ("" if usable else "raytrain install-horovod")


def show(monkeypatch: pytest.MonkeyPatch, horovod: str | None, torch: str) -> None:
    """Pretend that these versions are installed."""

    def version(name: str) -> str:
        found = {"horovod": horovod, "torch": torch}[name]
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(horovod_usable, "version", version)


def test_a_cpu_build_keeps_its_name() -> None:
    # A wheel of this name may be in users' caches.
    assert fixed_version("2.13.0+cpu") == f"0.28.1+raytrain.{digest(EDITS)}.torch.2.13.0.cpu"


def test_a_missing_compiled_extension_is_noticed_without_loading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(monkeypatch, fixed_version("2.13.0+cpu"), "2.13.0+cpu")
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    for package in ("horovod", "horovod/torch"):
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('it was loaded')")
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert "lacks its compiled extension" in horovod_state().reason
    assert horovod_usable.choose_collective("auto") == "torch"
    with pytest.raises(InputError, match="lacks its compiled extension") as caught:
        horovod_usable.choose_collective("horovod")
    assert caught.value.remedy == "raytrain install-horovod"
    (tmp_path / "horovod" / "torch" / f"mpi_lib_v2{EXTENSION_SUFFIXES[0]}").touch()
    assert horovod_usable.choose_collective("horovod") == "horovod"


def test_auto_uses_torch_if_horovod_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_usable, "horovod_state", lambda: HorovodState(False, "it is not installed", "x"))
    assert horovod_usable.choose_collective("auto") == "torch"
    monkeypatch.setattr(horovod_usable, "horovod_state", lambda: HorovodState(True, "it is", ""))
    assert horovod_usable.choose_collective("auto") == "horovod"


def test_an_unusable_build_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, "0.28.1+raytrain.fb9ace7e.torch.2.13.0.cpu", "2.13.0+cpu")
    said = horovod_usable.passed_over("auto")
    assert "another process on the machine can join a run" in said
    assert said.endswith("(to use Horovod: raytrain install-horovod)")
    assert horovod_usable.passed_over("torch") == ""
    with pytest.raises(InputError, match="lacks fixes of this version") as caught:
        horovod_usable.choose_collective("horovod")
    assert caught.value.remedy == "raytrain install-horovod"
    show(monkeypatch, None, "2.13.0+cpu")
    assert horovod_usable.passed_over("auto") == ""


def test_nccl_is_used_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_usable, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="nccl4py is not installed") as caught:
        horovod_usable.choose_collective("nccl")
    assert caught.value.remedy == "pip install 'raytrain-plus[nccl]'"
    monkeypatch.setattr(horovod_usable, "find_spec", lambda name: name)
    assert horovod_usable.choose_collective("nccl") == "nccl"
