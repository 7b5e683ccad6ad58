"""Start a detached run on a local Ray in its own process; it survives the process that launched it.

Run as a module, this is the detached process. It reads the pickled order from standard input. On standard output it
answers None, pickled, once the run has started, or the error that prevented it. Everything it prints goes to a file.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import cloudpickle

from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.credentials import without_credentials
from raytrain_plus.errors import RaytrainError, RunError
from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.views.progress import PlainView

MODULE = "raytrain_plus.launch.background"


def begin_in_background(order: RunOrder) -> None:
    """Start a run on a local Ray of its own, detached from this process; return once it trains.

    What the run prints goes to a file in the system's temporary folder. Raises the error that prevented the start.
    """
    log = Path(tempfile.mkdtemp(prefix=f"raytrain-{order.plan.job.name}-")) / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # A process that has ended already closes the pipe and does not answer.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(cloudpickle.dumps(order))
        with process.stdout:
            answer = process.stdout.read()
    except BaseException:
        process.terminate()
        raise
    # Reap the process when it ends, so that it does not stay a zombie.
    threading.Thread(target=process.wait, daemon=True).start()
    if not answer:
        raise RunError(f"the run's process has ended (exit code {process.wait()}); its output is in {log}")
    error = pickle.loads(answer)
    if error is not None:
        raise error


class _Beginning(PlainView):
    """A plain view that also reports to the launching process that the run has started."""

    def __init__(self, stream: TextIO, tell: Callable[[RaytrainError | None], None]) -> None:
        super().__init__(stream)
        self._tell = tell

    def event(self, event: RunEvent) -> None:
        if event["kind"] == "view_formed":
            self._tell(None)
        super().event(event)


def main() -> None:
    """Run the order from standard input until it ends."""
    from raytrain_plus.launch.cluster import connected
    from raytrain_plus.launch.driver import Signals, drive

    order: RunOrder = pickle.load(sys.stdin.buffer)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # From here on, standard output goes to the same file as standard error.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(error: RaytrainError | None) -> None:
        # The launching process may be gone, or may have its answer already.
        with contextlib.suppress(BrokenPipeError, ValueError):
            answer.write(pickle.dumps(error))
            answer.close()

    with Signals() as signals:
        try:
            with connected(order.plan.job, None) as began:
                # Ray's C++ code has replaced our signal handlers.
                signals.listen()
                result = drive(order, began, _Beginning(sys.stdout, tell), signals)
        except RaytrainError as error:
            print(error, file=sys.stderr)
            tell(error)
            sys.exit(1)
        except Exception:
            print(without_credentials(traceback.format_exc()), file=sys.stderr)
            sys.exit(1)
    sys.exit(result.exit_code)


if __name__ == "__main__":
    main()
