"""Whether Horovod can be used here, found out without loading it into this process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from raytrain_plus.errors import InputError
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


def fixed_version(torch: str) -> str:
    """The version of a Horovod that carries this package's fixes and is built against that torch."""
    return f"{HOROVOD_VERSION}+raytrain.{digest(EDITS)}.torch.{re.sub(r'[^a-z0-9]+', '.', torch.lower())}"


def horovod_state() -> HorovodState:
    """Looks at versions alone, which is cheap: that of the build, and of the torch that it was built against."""
    try:
        installed, torch = version("horovod"), version("torch")
    except PackageNotFoundError as error:
        return HorovodState(False, f"{error.name} is not installed", REMEDY)
    wanted = fixed_version(torch)
    if installed == wanted:
        return HorovodState(True, installed, "")
    if installed.partition(".torch.")[0] == wanted.partition(".torch.")[0]:
        return HorovodState(False, f"the installed build {installed} is for another torch than {torch}", REMEDY)
    return HorovodState(
        False, f"the installed build {installed} lacks fixes without which a lost worker takes the others along", REMEDY
    )


def choose_collective(wanted: str, workers: int) -> str:
    """`horovod` or `torch`. Raises `InputError` where Horovod was named and is not really built."""
    if wanted == "torch":
        return "torch"
    state = horovod_state()
    if state.usable:
        return "horovod"
    if wanted == "horovod":
        raise InputError(f"Horovod cannot be used: {state.reason}", where="collective: horovod", remedy=state.remedy)
    return "torch"


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
