"""A run on a Ray of its own, in a process of its own: it goes on when whoever began it has gone.

As a module: that process. It takes the order from standard input, and answers on standard output, pickled, when the run
has begun, or with the error that kept it from that; whatever it prints goes to a file.
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

from raytrain_plus.controller.order import Order
from raytrain_plus.credentials import without_credentials
from raytrain_plus.errors import RaytrainError, RunError
from raytrain_plus.observe.events import Event
from raytrain_plus.observe.progress import PlainView

MODULE = "raytrain_plus.launch.background"


def begin_in_background(order: Order) -> None:
    """Has what is ordered run on a Ray of its own, whatever becomes of this process; returns when it trains.

    Raises what kept it from that. What the run prints goes to a file in the folder for temporary files.
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
        # One that has ended already does not take it, and says nothing.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(cloudpickle.dumps(order))
        with process.stdout:
            answer = process.stdout.read()
    except BaseException:
        process.terminate()
        raise
    # So that nothing of it stays in the table of processes when it has ended.
    threading.Thread(target=process.wait, daemon=True).start()
    if not answer:
        raise RunError(f"the run's process has ended (exit code {process.wait()}); what it printed is in {log}")
    error = pickle.loads(answer)
    if error is not None:
        raise error


class _Beginning(PlainView):
    """Tells who waits for it that the run has begun."""

    def __init__(self, stream: TextIO, tell: Callable[[RaytrainError | None], None]) -> None:
        super().__init__(stream)
        self._tell = tell

    def event(self, event: Event) -> None:
        if event["kind"] == "view_formed":
            self._tell(None)
        super().event(event)


def main() -> None:
    """Runs what comes on standard input to its end."""
    from raytrain_plus.launch.cluster import connected
    from raytrain_plus.launch.driver import Signals, drive

    order: Order = pickle.load(sys.stdin.buffer)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What is printed from here on goes where errors go.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(error: RaytrainError | None) -> None:
        # Nobody may be there any more to hear it.
        with contextlib.suppress(BrokenPipeError, ValueError):
            answer.write(pickle.dumps(error))
            answer.close()

    with Signals() as signals:
        try:
            with connected(order.plan.job, None) as began:
                # Ray's own code in C++ has put something in their place.
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
