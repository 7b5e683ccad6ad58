"""Train jobs/byte_gpt.yaml for some steps, kill a worker half-way, show what that cost: python -m examples.demo"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from examples.lanes import Event
from raytrain_plus import Result, run
from raytrain_plus.audit.audit import audit
from raytrain_plus.job.yaml import load_job
from raytrain_plus.observe.views.progress import ProgressView, say, view_for

JOB = Path(__file__).parent.parent / "jobs" / "byte_gpt.yaml"


def main() -> None:
    """Make the run and print the summary; below it, which rows were used."""
    # One worker is enough to continue, so nobody waits for the replacement; and a quarter of the steps, a minute.
    job, roots = load_job(JOB, ["workers.min=1", "workers.max=2", "steps=75", "evaluate.every_steps=25"])
    result = run(job, fresh=True, view=KillHalfWay(view_for(sys.stdout)), roots=roots)
    if result.status == "finished":
        print("\n".join(audit(result.path).lines()))
    sys.exit(result.exit_code)


class KillHalfWay:
    """Show a run on this machine in another view, and kill one of its workers after half of the steps."""

    def __init__(self, view: ProgressView) -> None:
        self._view = view
        self._half = 0
        self._pids: list[int] = []
        self._killed = False

    def start(self, name: str, steps: int) -> None:
        """Show that the run begins."""
        self._half = steps // 2
        self._view.start(name, steps)

    def event(self, event: Event) -> None:
        """Show an event; kill the worker at the first one after half of the steps in a group of several."""
        if event["kind"] == "view_formed":
            self._pids = [member["pid"] for member in event["members"]]
        due = event["kind"] == "step_committed" and event["step"] + 1 >= self._half
        if due and not self._killed and len(self._pids) > 1:
            self._killed = True
            say(f"the demo kills a worker now: kill -KILL {self._pids[-1]}", sys.stdout)
            os.kill(self._pids[-1], signal.SIGKILL)
        self._view.event(event)

    def finish(self, result: Result) -> None:
        """Show the result."""
        self._view.finish(result)

    def close(self) -> None:
        """End the display."""
        self._view.close()


if __name__ == "__main__":
    main()
