"""Keep converted data on this node: made by one process at a time, and there completely or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from raytrain_plus.data.convert.parts import is_complete, mark_complete
from raytrain_plus.errors import DataError, WaitExpired

VARIABLE = "RAYTRAIN_CACHE"
"""The environment variable that names another folder, on a machine: where its disk is, say."""
LOCK_S = 24 * 3600.0
"""Maximum seconds to wait for another process of this node that converts the same data."""


def default_cache() -> Path:
    """Return the folder of converted data: in `RAYTRAIN_CACHE`, or `XDG_CACHE_HOME`, or the home folder's `.cache`.

    The process of a pod may have no home, or none that it can write to: then below the temporary folder.

    Raises `DataError` if the folder that is named is relative, or that below the temporary one is another user's.
    """
    if named := os.environ.get(VARIABLE):
        folder = Path(named).expanduser()
        if not folder.is_absolute():
            what = "is a relative path, and processes work in different folders"
            raise DataError(what, f"{VARIABLE}={named}", remedy="name an absolute one")
        return folder / "data"
    homes = [Path(shared)] if (shared := os.environ.get("XDG_CACHE_HOME")) else []
    with contextlib.suppress(RuntimeError, KeyError):
        homes.append(Path.home() / ".cache")
    made = (one / "raytrain_plus" / "data" for one in homes if one.is_absolute())
    return next(filter(_writable, made), None) or _temporary() / "data"


def _temporary() -> Path:
    folder = Path(tempfile.gettempdir()) / f"raytrain_plus-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    # Others may write to the folder for temporary files, and would be believed.
    if folder.exists() and folder.stat().st_uid != os.getuid():
        remedy = f"set {VARIABLE} on this machine to a folder of yours"
        raise DataError("belongs to another user", str(folder), remedy=remedy)
    return folder


def _writable(folder: Path) -> bool:
    """Make a folder, and return whether this process can write to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def made_once(target: Path, source: str, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder with parts, which becomes `target`, unless `target` is complete.

    `write` gets a folder in which an earlier process, which has ended, may have left its parts. `source`: the data's
    name, for errors. Raises `DataError` if it writes no rows or the folder cannot be written, and `WaitExpired` if
    another process makes it for more than `LOCK_S`.
    """
    if is_complete(target):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=LOCK_S):
            if not is_complete(target):
                # Whoever tidies up a cache may remove single files.
                shutil.rmtree(target, ignore_errors=True)
                partial = target.with_name(f".{target.name}.partial")
                partial.mkdir(exist_ok=True)
                write(partial)
                if not any(partial.glob("part-*")):
                    raise DataError("there are no rows", source, expected="rows to train on")
                mark_complete(partial)
                os.replace(partial, target)
    except Timeout as error:
        raise WaitExpired(f"another process has been converting {source} for more than {LOCK_S:g} s") from error
    except OSError as error:
        raise DataError(
            f"cannot be converted: {error.strerror or error}",
            where=str(error.filename or target),
            remedy=f"make room there, or set {VARIABLE} on this machine to another folder, on a larger disk",
        ) from error
