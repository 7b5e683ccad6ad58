"""End a run: how, and with which error."""

from __future__ import annotations

from raytrain_plus.controller.group.arrivals import Arrivals
from raytrain_plus.controller.group.members import Members
from raytrain_plus.controller.group.model_hand_over import ModelHandOver
from raytrain_plus.controller.run import Handlers, Run
from raytrain_plus.controller.run_order import Closing
from raytrain_plus.errors import DataChanged, RaytrainError, RunError, TrainingError
from raytrain_plus.membership import events as e
from raytrain_plus.result import Result


class Ending:
    """Determines the status and the error of a run that ends, and writes both."""

    def __init__(self, run: Run, members: Members, arrivals: Arrivals, hand_over: ModelHandOver, began: float) -> None:
        """Prepare the end; `began`: Unix seconds at which Ray was available."""
        self.record, self.journal, self.job, self.began = run.record, run.journal, run.job.name, began
        self.members, self.arrivals, self.hand_over = members, arrivals, hand_over
        self.closing: Closing | None = None
        """How the run has ended; None while it has not."""

    @property
    def handles(self) -> Handlers:
        """See `Handling`."""
        return {e.End: self.end}

    def end(self, command: e.End) -> None:
        """End the run as the machine says, unless something worse was found. Raises if it never began."""
        status, error = self._found(command)
        if error is not None and not self.journal.opened:
            # Nothing was ever trained: there is no run to report, and no folder.
            raise error
        if isinstance(error, DataChanged) and error.first is not None:
            self.journal.data_changed(error.first)
        why = None if error is None else str(error)
        early = self.hand_over.stopped_early if status == "finished" else None
        result = self.record.finish(
            self.job, status, why, self.hand_over.export, self.began, self._unsaved(status), early
        )
        self.closing = Closing(result=result, error=error)

    def fail(self, why: str) -> Result:
        """End the run because the controller cannot continue it. Raises `RunError` if that cannot be written."""
        return self.record.finish(self.job, "failed", why, None, self.began)

    def _unsaved(self, status: str) -> str | None:
        """Return why the state that a stopped run ends with was not saved; None if it was."""
        committed, checkpoints = self.record.committed, self.hand_over.checkpoints
        saved = committed <= checkpoints.durable
        return None if status != "stopped" or saved else checkpoints.why_unsaved(committed)

    def _found(self, command: e.End) -> tuple[str, RaytrainError | None]:
        """Return the run's status, and the error that it ends with, if any."""
        if command.status == "failed":
            error, step = self.members.errors.get(command.why, (RunError(command.why), None))
            return "failed", error if step is None else in_step(error, step, self.record.committed)
        if found := self.arrivals.data_changed or self.hand_over.error:
            return "failed", found
        if self.members.differ:
            digests = ", ".join(f"{name}: {sha[:12]}" for name, sha in self.members.digests.items())
            return "failed", RunError(f"the workers' states differ at the end ({digests}); please report this")
        return command.status, RunError(command.why) if command.why else None


def in_step(error: RaytrainError, step: int, committed: int) -> RaytrainError:
    """Return an error with whether the step in which it was raised counts; `committed`: the newest step that does."""
    if not isinstance(error, TrainingError):
        return error
    counts = "counts, because other workers have applied it" if step <= committed else "was not applied"
    return TrainingError(f"{error.what} (step {step} {counts})", error.user_traceback)
