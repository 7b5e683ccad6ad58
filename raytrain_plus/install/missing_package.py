"""Build the error for a missing package that raytrain_plus itself imports. Pure."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from raytrain_plus.errors import InputError


def missing_package(error: ModuleNotFoundError) -> InputError | None:
    """Return the error for a failed import of this package.

    None if another package's import failed, or the missing module is part of this package.
    """
    *_, last = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).parents[1]
    if error.name is None or error.name.split(".")[0] == package.name or package not in Path(last.filename).parents:
        return None
    return InputError(
        f"the Python package '{error.name}' is not installed",
        where=sys.executable,
        expected="a Python with the packages that raytrain-plus requires",
        remedy="activate the environment in which it is installed; for submitted jobs do so on each machine of the "
        "cluster, before `ray start`",
    )
