"""Call the methods of a task that hear of its run: `on_step`, `on_evaluate`, `on_checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from raytrain_plus.credentials import without_credentials
from raytrain_plus.job.task_loader import build_task, fault_of, load_task, users_frames
from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.trackers.bookmark import Bookmark
from raytrain_plus.observe.trackers.listened import CalledTask
from raytrain_plus.observe.trackers.listener import Report
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.task import RunFacts, StopRun, Task

CALLS = ("on_step", "on_evaluate", "on_checkpoint")


def defined_callbacks(task: type[Task]) -> tuple[str, ...]:
    """Return the names of the methods that this class defines and that hear of a run."""
    return tuple(name for name in CALLS if getattr(task, name) is not getattr(Task, name))


class Callbacks:
    """A `Listener` that calls a task's methods. One that raises is reported, and its call counts as made."""

    period_s = 0.25
    most = 1

    def __init__(self, called: CalledTask, bookmark: Bookmark, report: Report, stop: Callable[[], None]) -> None:
        """Build the task, without its model; `stop` asks the run to stop. Raises `TaskError` and `InputError`."""
        self._task = built(called)
        self._checkpoints = open_folder(called.checkpoints)
        self._bookmark = bookmark
        self._report, self._stop = report, stop

    def hear(self, events: Sequence[RunEvent]) -> None:
        """See `Listener`."""
        for event in events:
            try:
                returned = call(self._task, event, lambda name: self._checkpoints.inside(name).address)
            except BaseException as error:
                self._report(*raised(event, error))
                continue
            # What was asked of an earlier controller has stopped that one.
            if isinstance(returned, StopRun) and not self._bookmark.in_earlier_log:
                why = without_credentials(returned.why)
                self._report("stop", f"Task.{_name(event)} after step {event['step'] + 1} stops the run: {why}")
                self._stop()

    def end(self, status: str) -> None:
        """See `Listener`; no method hears of the end."""


def call(task: Task, event: RunEvent, checkpoint: Callable[[str], str]) -> StopRun | None:
    """Call the method of the task that hears of this event, if there is one; return what it returns.

    `checkpoint` returns the path of a checkpoint, given its name. Raises what the method raises.
    """
    kind = event["kind"]
    if kind == "step_committed":
        return task.on_step(step_values(event))
    if kind == "evaluated":
        return task.on_evaluate(event["step"], _numbers(event["metrics"]))
    if kind == "checkpoint_saved" and "checkpoint" in event:
        return task.on_checkpoint(event["step"], checkpoint(event["checkpoint"]))
    return None


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


def raised(event: RunEvent, error: BaseException) -> tuple[str, str]:
    """Return the report of a method that raised, as a cause and a text with the place in the user's file."""
    name = _name(event)
    frames = users_frames(error)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    first = next(iter(str(error).splitlines()), "")
    what = without_credentials(f"{type(error).__name__}: {first}"[:200])
    text = f"Task.{name} raised {what}{place} (step {event['step'] + 1}); the run and further calls continue"
    return f"{name} {fault_of(error)}", text


def _name(event: RunEvent) -> str:
    return {"step_committed": "on_step", "evaluated": "on_evaluate"}.get(event["kind"], "on_checkpoint")


def built(called: CalledTask) -> Task:
    """Return an instance of the task, without its model. Raises `TaskError` and `InputError`."""
    roots = [Path(root) for root in called.roots]
    given = called.task if called.pickled_task is None else cloudpickle.loads(called.pickled_task)
    facts = RunFacts(total_steps=called.total_steps, batch_size=called.batch_size, rows=called.rows)
    return build_task(load_task(given, roots), called.args, facts)
