"""What is said where the Python that runs this package lacks another that it needs. Pure."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from raytrain_plus.errors import InputError


def lacking(error: ModuleNotFoundError) -> InputError | None:
    """None where it was not one of this package's own imports that failed, or this package lacks a part of itself."""
    *_, last = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).parents[1]
    if error.name is None or error.name.split(".")[0] == package.name or package not in Path(last.filename).parents:
        return None
    return InputError(
        f"there is no package '{error.name}'",
        where=sys.executable,
        expected="a Python with what raytrain-plus needs",
        remedy="activate the environment in which it is installed; for a job that is sent to a cluster, before "
        "`ray start`, on each machine",
    )
