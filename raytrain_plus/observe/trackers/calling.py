"""The process that calls a task's methods which hear of a run: see `observe.trackers.callbacks`.

The first line of its input is {called, place}: the task, and where to begin in the run's log. {end} follows when the
log is complete: the process then calls the rest and exits. If the input ends before that, the controller is dead, and
the next one calls the rest. The output is {place} after each call, and {cause, text} with what is to be reported.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from raytrain_plus.credentials import without_credentials
from raytrain_plus.errors import RaytrainError
from raytrain_plus.job.task_loader import build_task, fault_of, load_task, users_frames
from raytrain_plus.observe.run_events import RunEvent, Tail
from raytrain_plus.observe.trackers.callbacks import CalledTask
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.task import Task

PERIOD_S = 0.25
"""Seconds between two looks at a log on a file system."""
REMOTE_S = 2.0
"""The same in remote storage, where each look costs a request."""
GOING_S = 5.0
"""Maximum seconds for the call in progress when the controller has died."""

Tell = Callable[[Mapping[str, Any]], None]


def call(task: Task, event: RunEvent, checkpoint: Callable[[str], str]) -> bool:
    """Call the method of the task that hears of this event; return whether there is one. Raises what it raises.

    `checkpoint` returns the path of a checkpoint, given its name.
    """
    kind = event["kind"]
    if kind == "step_committed":
        task.on_step(step_values(event))
    elif kind == "evaluated":
        task.on_evaluate(event["step"], _numbers(event["metrics"]))
    elif kind == "checkpoint_saved" and "checkpoint" in event:
        task.on_checkpoint(event["step"], checkpoint(event["checkpoint"]))
    else:
        return False
    return True


def step_values(event: RunEvent) -> dict[str, Any]:
    """Return what `Task.on_step` gets of a committed step."""
    values = {name: event[name] for name in ("step", "epoch", "samples", "seconds")}
    values["loss"] = float(event["loss"])
    values["grad_norm"] = float(event["grad_norm"])
    values["skipped"] = bool(event.get("skipped"))
    values["lr"] = event.get("lr")
    values["metrics"] = _numbers(event.get("metrics", {}))
    return values


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    # JSON holds numbers that are not finite as text.
    return {name: float(value) for name, value in metrics.items()}


class Caller:
    """Calls a task's methods with a run's events, in order, and answers how far it is."""

    def __init__(self, task: Task, tail: Tail, checkpoint: Callable[[str], str], tell: Tell) -> None:
        self._task, self._tail, self._checkpoint, self._tell = task, tail, checkpoint, tell

    def calls(self) -> Iterator[None]:
        """Make the calls for all events that are in the log by now; yield after each of them.

        A method that raises is reported, and its call counts as made.
        """
        for event in self._tail.read():
            try:
                made = call(self._task, event, self._checkpoint)
            except BaseException as error:
                made = True
                self._tell(raised(event, error))
            if made:
                self._tell({"place": self._tail.place})
                yield
        self._tell({"place": self._tail.place})


def raised(event: RunEvent, error: BaseException) -> Mapping[str, str]:
    """Return the report of a method that raised, with the place in the user's file."""
    name = {"step_committed": "on_step", "evaluated": "on_evaluate"}.get(event["kind"], "on_checkpoint")
    frames = users_frames(error)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    first = next(iter(str(error).splitlines()), "")
    what = without_credentials(f"{type(error).__name__}: {first}"[:200])
    text = f"Task.{name} raised {what}{place} (step {event['step'] + 1}); the run and further calls continue"
    return {"cause": f"{name} {fault_of(error)}", "text": text}


def built(called: CalledTask) -> Task:
    """Return an instance of the task, without its model. Raises `TaskError` and `InputError`."""
    roots = [Path(root) for root in called.roots]
    given = called.task if called.pickled_task is None else cloudpickle.loads(called.pickled_task)
    return build_task(load_task(given, roots), called.args, called.facts)


class Input:
    """What the controller says, read on a thread."""

    def __init__(self, lines: BinaryIO) -> None:
        self._lines = lines
        self.complete = threading.Event()
        """Set when the log is complete."""
        self.gone = False
        """Whether the controller is dead."""

    def read(self) -> None:
        """Read until the input ends, and end this process soon after."""
        for line in self._lines:
            if b'"end"' in line:
                self.complete.set()
        if not self.complete.is_set():
            self.gone = True
            self.complete.set()
            # The call in progress may hang.
            threading.Event().wait(GOING_S)
            os._exit(0)


def main() -> None:
    """Call the methods of the task that the first line of the input holds, until the run ends."""
    lines = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    # Keep the task's own input and output away from the protocol; what it prints is shown with the controller's.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(what: Mapping[str, Any]) -> None:
        try:
            answers.write(json.dumps(what).encode() + b"\n")
        except BrokenPipeError:
            os._exit(0)

    first: dict[str, Any] = json.loads(lines.readline())
    called: CalledTask = pickle.loads(base64.b64decode(first["called"]))
    told = Input(lines)
    threading.Thread(target=told.read, daemon=True).start()
    run, checkpoints = open_folder(called.folder), open_folder(called.checkpoints)
    try:
        task = built(called)
    except RaytrainError as error:
        tell({"cause": "the task", "text": f"the task's callbacks are not called: {error}"})
        return
    caller = Caller(task, Tail(run, *first["place"]), lambda name: checkpoints.inside(name).address, tell)
    period_s = REMOTE_S if run.path is None else PERIOD_S
    while True:
        # Asked before the log is read: all of it is there then.
        complete = told.complete.is_set()
        for _ in caller.calls():
            if told.gone:
                return
        if complete:
            return
        told.complete.wait(period_s)


if __name__ == "__main__":
    main()
