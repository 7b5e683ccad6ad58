"""Find out whether Horovod can be used here, without loading it into this process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from raytrain_plus.errors import InputError
from raytrain_plus.install.edit import digest
from raytrain_plus.install.fixes import EDITS, HOROVOD_VERSION

REMEDY = "raytrain install-horovod"
PROBE_S = 120.0

_PROBE = """
import json, torch
import horovod.torch as hvd
print(json.dumps({"gloo": bool(hvd.gloo_built()), "torch": torch.__version__}))
"""


@dataclass(frozen=True, slots=True)
class HorovodState:
    """Whether Horovod works here."""

    usable: bool
    reason: str
    """Why it is not usable; or the installed version."""
    remedy: str
    """The command that fixes it; empty if nothing is wrong."""
    installed: bool = True
    """Whether any Horovod is installed."""


def fixed_version(torch: str) -> str:
    """Return the version of a Horovod with this package's fixes, built for a version of torch."""
    built_for = re.sub(r"[^a-z0-9]+", ".", torch.lower())
    return f"{HOROVOD_VERSION}+raytrain.{digest(EDITS)}.torch.{built_for}"


def horovod_state() -> HorovodState:
    """Return the state from cheap checks only: the versions of Horovod and torch, and the compiled part's file."""
    try:
        installed, torch = version("horovod"), version("torch")
    except PackageNotFoundError as error:
        return HorovodState(False, f"{error.name} is not installed", REMEDY, installed=False)
    wanted = fixed_version(torch)
    if installed == wanted:
        if not _compiled_part_is_there():
            return HorovodState(False, f"the installed build {installed} lacks its compiled extension", REMEDY)
        return HorovodState(True, installed, "")
    if installed.partition(".torch.")[0] == wanted.partition(".torch.")[0]:
        return HorovodState(False, f"the installed build {installed} is for a torch other than {torch}", REMEDY)
    return HorovodState(
        False,
        f"the installed build {installed} lacks fixes of this version; without them a lost worker can abort the "
        "others, or another process on the machine can join a run",
        REMEDY,
    )


def _compiled_part_is_there() -> bool:
    """Return whether the compiled extension of `horovod.torch` exists, without importing it."""
    found = find_spec("horovod")
    folders = (found.submodule_search_locations if found else None) or ()
    return any(
        os.path.isfile(os.path.join(folder, "torch", f"mpi_lib_v2{ending}"))
        for folder in folders
        for ending in EXTENSION_SUFFIXES
    )


def choose_collective(wanted: str) -> str:
    """Return `horovod`, `torch` or `nccl`. Raises `InputError` if one is requested explicitly and is not usable."""
    if wanted == "nccl" and find_spec("nccl") is None:
        raise InputError(
            "nccl4py is not installed", where="collective: nccl", remedy="pip install 'raytrain-plus[nccl]'"
        )
    if wanted in ("torch", "nccl"):
        return wanted
    state = horovod_state()
    if state.usable:
        return "horovod"
    if wanted == "horovod":
        raise InputError(f"Horovod cannot be used: {state.reason}", where="collective: horovod", remedy=state.remedy)
    return "torch"


def passed_over(wanted: str) -> str:
    """Return why `collective: auto` does not use the installed Horovod; empty if it does, or none is installed."""
    state = horovod_state()
    if wanted != "auto" or state.usable or not state.installed:
        return ""
    return f"Horovod is not used: {state.reason}; this run uses torch.distributed (to use Horovod: {state.remedy})"


def probe() -> HorovodState:
    """Return the state after loading Horovod in a separate process; reliable, takes seconds."""
    state = horovod_state()
    if not state.usable:
        return state
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return HorovodState(False, f"it did not load within {PROBE_S:g} s", REMEDY)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return HorovodState(False, f"it does not load: {last}", REMEDY)
    built = json.loads(done.stdout)
    if not built["gloo"]:
        return HorovodState(False, "it was built without Gloo", REMEDY)
    return HorovodState(True, f"{state.reason}, for torch {built['torch']}", "")
