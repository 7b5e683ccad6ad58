"""Where a Ray that a run starts keeps its sockets: their paths have few characters to spare."""

from __future__ import annotations

import os
from collections.abc import Mapping

SHORT = "/tmp"
LONGEST = 107 - len("/ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""Maximum characters of the folder below which Ray makes its own: Linux takes a socket's path of at most 107."""


def ray_folder(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder to name to Ray; None where the one that it takes by itself is short enough."""
    own = environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or SHORT
    return None if len(os.fsencode(own)) <= LONGEST else f"{SHORT}/ray"
