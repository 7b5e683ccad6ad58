"""Describe an unexpected error so that its reader can report it."""

from __future__ import annotations

import platform
import traceback
from importlib.metadata import version

from raytrain_plus.credentials import without_credentials
from raytrain_plus.release import VERSION


def bug_report(error: BaseException) -> str:
    """Return the traceback of an error that is a bug of this package, and the versions to report with it."""
    lines = "".join(traceback.format_exception(error))
    names = ("ray", "torch", "pyarrow")
    versions = ", ".join([f"raytrain-plus {VERSION}", *(f"{name} {version(name)}" for name in names)])
    return (
        f"{without_credentials(lines)}\n"
        "This is a bug in raytrain_plus, not in your job. Please report it with the lines above and these:\n"
        f"  Python {platform.python_version()} on {platform.platform()}; {versions}"
    )
