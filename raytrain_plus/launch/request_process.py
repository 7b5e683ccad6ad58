"""Send a request to a run from a process of its own; the caller keeps its connection to another Ray, or to none.

Run as a module, this is that process. It reads the folder's address and the request, pickled, from standard input. On
standard output it answers None, pickled, once the controller has the request, or the error that prevented it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable

from raytrain_plus.errors import RaytrainError, RunError
from raytrain_plus.launch.bug_report import bug_report
from raytrain_plus.launch.request import Request
from raytrain_plus.storage.address import split
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder

MODULE = "raytrain_plus.launch.request_process"
REQUEST_S = 60.0
"""Maximum seconds for a run to receive a request."""


def send_apart(run: Folder, request: Request) -> None:
    """Send a request to the run in this folder, as `send` does, without joining the run's cluster in this process.

    Raises the errors of `send`; `RunError` also if the run does not have the request within `REQUEST_S`.
    """
    name = split(run.address)[1]
    try:
        process = subprocess.run(
            [sys.executable, "-m", MODULE],
            input=pickle.dumps((run.address, request)),
            capture_output=True,
            timeout=REQUEST_S,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"the run {name} did not answer the request within {REQUEST_S:.0f} s") from None
    if not process.stdout:
        said = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        because = f"exit code {process.returncode}: {said}" if said else f"exit code {process.returncode}"
        raise RunError(f"the run {name} cannot be reached ({because})")
    error = pickle.loads(process.stdout)
    if error is not None:
        raise error


def main() -> None:
    """Send the request from standard input."""
    # Imported here because it loads Ray, which the process that sends a request may not need.
    from raytrain_plus.launch.control import send

    address, request = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answer:
        # From here on, what Ray prints cannot mix with the answer.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        answer.write(pickle.dumps(_error_of(lambda: send(open_folder(address), request))))


def _error_of(call: Callable[[], object]) -> RaytrainError | None:
    try:
        call()
    except RaytrainError as error:
        return error
    except Exception as error:
        return RunError(bug_report(error))
    return None


if __name__ == "__main__":
    main()
