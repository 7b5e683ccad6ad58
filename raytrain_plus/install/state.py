"""Whether Horovod can be used here, found out without loading it into this process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from raytrain_plus.install.fixes import EDITS, HOROVOD_VERSION, digest

REMEDY = "raytrain install-horovod"
PROBE_S = 120.0

_PROBE = """
import json, torch
import horovod.torch as hvd
print(json.dumps({"gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built()), "torch": torch.__version__}))
"""


@dataclass(frozen=True, slots=True)
class HorovodState:
    """Whether Horovod works here."""

    usable: bool
    reason: str
    """Why not; or what is there."""
    remedy: str
    """The command that mends it; empty where nothing is wrong."""


def fixed_version() -> str:
    """The version of a Horovod that carries this package's fixes."""
    return f"{HOROVOD_VERSION}+raytrain.{digest(EDITS)}"


def horovod_state() -> HorovodState:
    """Looks at the installed package's version alone: cheap, and certain as long as torch was not changed since."""
    try:
        installed = version("horovod")
    except PackageNotFoundError:
        return HorovodState(False, "it is not installed", REMEDY)
    if installed != fixed_version():
        return HorovodState(
            False,
            f"the installed build {installed} lacks fixes without which a lost worker takes the others along",
            REMEDY,
        )
    return HorovodState(True, installed, "")


def probe() -> HorovodState:
    """Loads Horovod in a process of its own: certain, takes seconds."""
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
    return HorovodState(
        True, f"{state.reason}, for torch {built['torch']}, NCCL {'on' if built['nccl'] else 'off'}", ""
    )
