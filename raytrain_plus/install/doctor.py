"""Check the environment: what is installed, what is missing, and the command that fixes it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from raytrain_plus.install.check import Check
from raytrain_plus.install.gpu_probe import probe_nvml, probe_torch
from raytrain_plus.install.gpus import gpu_checks
from raytrain_plus.install.horovod import missing_tools
from raytrain_plus.install.horovod_usable import probe
from raytrain_plus.install.ray_folder import LONGEST, SHORT, ray_folder

_NEEDED = {"ray": (2, 55), "torch": (2, 10), "pyarrow": (17, 0), "numpy": (1, 26)}


def checks() -> list[Check]:
    """Run all checks; takes a few seconds and changes nothing."""
    return [Check("Python", "PASS", platform.python_version()), *_packages(), *_horovod(), *_gpus(), *_machine()]


def _packages() -> Iterator[Check]:
    for name, floor in _NEEDED.items():
        wanted = ".".join(map(str, floor))
        try:
            text = version(name)
        except PackageNotFoundError:
            yield Check(name, "FAIL", "not installed", f"pip install '{name}>={wanted}'")
            continue
        digits = tuple(int(part) for part in text.split("+")[0].split(".")[:2])
        if digits < floor:
            yield Check(name, "FAIL", f"{text}; {wanted} or newer is required", f"pip install '{name}>={wanted}'")
        else:
            yield Check(name, "PASS", text)


def _horovod() -> Iterator[Check]:
    state = probe()
    if state.usable:
        yield Check("Horovod", "PASS", state.reason)
        return
    yield Check("Horovod", "WARN", f"{state.reason}; `collective: auto` uses torch.distributed instead", state.remedy)
    for problem in missing_tools():
        yield Check("to build Horovod", "WARN", problem.what, problem.remedy)


def _gpus() -> list[Check]:
    found = probe_nvml()
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return gpu_checks(found, None)
    # Most machines without GPUs have this build, and need not wait until it is loaded.
    alone = found is None and torch.endswith("+cpu")
    return gpu_checks(found, None if alone else probe_torch())


def _machine() -> Iterator[Check]:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield (
        Check("disk", "PASS", f"{free:.0f} GiB free here")
        if free > 2
        else Check(
            "disk", "WARN", f"{free:.1f} GiB free here", "raytrain run JOB --set storage=FOLDER, on a disk with room"
        )
    )
    shared = Path("/dev/shm")
    if shared.exists():
        size = shutil.disk_usage(shared).total / 2**30
        yield (
            Check("shared memory", "PASS", f"{size:.1f} GiB")
            if size > 1
            else Check(
                "shared memory", "WARN", f"{size:.2f} GiB; Ray's object store will use disk", "docker run --shm-size=2g"
            )
        )
    named = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    yield (
        Check("Ray's folder", "PASS", "its sockets fit")
        if ray_folder() is None
        else Check(
            "Ray's folder",
            "WARN",
            f"{named} has more than {LONGEST} characters, too many for Ray's sockets; a run's own Ray takes {SHORT}",
            f"export RAY_TMPDIR={SHORT}, before ray start",
        )
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield (
        Check("open files", "PASS", f"{soft}")
        if soft >= 4096
        else Check("open files", "WARN", f"limit {soft}; Ray needs more", "ulimit -n 65536")
    )
    yield Check("processors", "PASS", f"{os.cpu_count()} on {socket.gethostname()}")
