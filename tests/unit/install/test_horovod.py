"""Which Horovod wheel is built, cached and used, and what happens to a broken one. Nothing is built here."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.errors import RunError
from raytrain_plus.install import horovod
from raytrain_plus.install.edit import digest
from raytrain_plus.install.fixes import EDITS, WITHOUT_CUDA
from raytrain_plus.install.horovod_usable import fixed_version


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The actions, in order, on a machine whose torch has CUDA and whose builds take no time."""
    done: list[str] = []

    def pip(arguments: Sequence[str], *rest: Any) -> None:
        done.append(" ".join((arguments[0], Path(arguments[-1]).name)))

    def build(kept: Path, torch: str, say: Any) -> Path:
        done.append("build")
        wheel = kept / f"horovod-{fixed_version(torch)}-cp.whl"
        kept.mkdir(parents=True)
        wheel.touch()
        return wheel

    for name, value in {
        "_pip": pip,
        "_build": build,
        "_torch_version": lambda: "2.13.0+cu130",
        "missing_tools": list,
        "prove": lambda: None,
    }.items():
        monkeypatch.setattr(horovod, name, value)
    monkeypatch.setattr(horovod.platformdirs, "user_cache_path", lambda name: tmp_path)
    return done


def test_a_build_is_cached(done: list[str]) -> None:
    wheel = horovod.install_horovod(lambda line: None)
    assert horovod.install_horovod(lambda line: None) == wheel
    assert done.count("build") == 1


def test_no_build_asks_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(arguments: Sequence[str], *rest: Any) -> None:
        folder = Path(arguments[arguments.index("-d" if arguments[0] == "download" else "-w") + 1])
        folder.mkdir(exist_ok=True)
        if arguments[0] == "download":
            with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as tar:
                tar.addfile(tarfile.TarInfo("horovod-0.28.1/horovod/__init__.py"), io.BytesIO())
        else:
            (folder / "horovod-0.28.1-cp.whl").touch()

    applied: list[Any] = []
    monkeypatch.setattr(horovod, "_pip", pip)
    monkeypatch.setattr(horovod, "apply_all", lambda source, edits: applied.extend(edits))
    assert horovod._build(tmp_path / "kept", "2.13.0+cu130", lambda line: None).exists()
    assert set(applied) == {*EDITS, WITHOUT_CUDA}


def test_the_log_of_what_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod.platformdirs, "user_cache_path", lambda name: tmp_path)
    log = tmp_path / "horovod" / "failed.log"
    output = "cc -c a.cc\na.cc:1: error: no such type\n  note: it ends\n"

    def fails(*arguments: Any, **settings: Any) -> Any:
        return subprocess.CompletedProcess(arguments, 1, output)

    def hangs(*arguments: Any, **settings: Any) -> Any:
        raise subprocess.TimeoutExpired("pip", 2, output=b"half of it")

    monkeypatch.setattr(horovod.subprocess, "run", fails)
    with pytest.raises(RunError) as caught:
        horovod._pip(["wheel"], 2, "building Horovod")
    assert str(caught.value) == (
        f"building Horovod failed (pip exited with 1):\na.cc:1: error: no such type\nits whole output is in {log}"
    )
    assert log.read_text() == output
    monkeypatch.setattr(horovod.subprocess, "run", hangs)
    with pytest.raises(RunError, match=r"took more than 2 s; its output is in .*failed\.log"):
        horovod._pip(["wheel"], 2, "building Horovod")
    assert log.read_text() == "half of it"


def test_the_cache_folder_of_a_cpu_build_is_stable(done: list[str]) -> None:
    # Users may have a cached wheel at this place.
    assert horovod.wheel_folder("2.13.0+cpu").name.endswith(f"-torch2.13.0+cpu-{digest(EDITS)}")


def test_a_wheel_that_fails_its_test_is_not_kept(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RunError("it does not work")

    monkeypatch.setattr(horovod, "prove", fail)
    said: list[str] = []
    with pytest.raises(RunError, match="it does not work"):
        horovod.install_horovod(said.append)
    wheel = f"horovod-{fixed_version('2.13.0+cu130')}-cp.whl"
    assert not list(horovod.wheel_folder("2.13.0+cu130").iterdir())
    assert done == ["build", f"install {wheel}", "install cffi", "uninstall horovod"]
    assert "the test failed" in said[-1]
