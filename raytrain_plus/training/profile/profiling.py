"""Profile some steps of a worker: a trace by torch.profiler, and the seconds of each phase. It never ends a run."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from raytrain_plus.device_clock import marks
from raytrain_plus.observe.step_profile import Profiled, ProfiledWorker, hidden_s, phase_seconds
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.step_records import Remark
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.profile.phase_watch import PREFIX, PhaseWatch, WatchedWorld

LIMIT_S = 300.0
"""Limit of the start and of the end of a trace, in seconds: the operations of a model are counted, and CUPTI loads."""
WRITE_S = 60.0
"""Maximum seconds for which the end of a run waits until its trace is written."""

log = logging.getLogger(__name__)


class Profiling:
    """Profiles the steps of one generation that are in a range. The training thread calls it."""

    def __init__(
        self,
        steps: range,
        device: torch.device,
        *,
        describe: Callable[[int], ProfiledWorker],
        write: Callable[[str, bytes], None],
        tell: Callable[[Profiled | Remark], None],
    ) -> None:
        """Prepare to profile `steps`.

        `describe`: returns the worker, if the given step is the first one that is profiled; it may take long. `write`:
        writes a file of the run, by its name. `tell`: reports a step, or what has failed.
        """
        self._steps = steps
        self._device = device
        self._describe = describe
        self._write_file = write
        self._tell = tell
        self._mark = marks(device)
        self._made: list[tuple[range, PhaseWatch]] = []
        """Steps whose times are not reported yet, because a GPU may not be past them."""
        self._of: ProfiledWorker | None = None
        self._profiler: profile | None = None
        self._writer: threading.Thread | None = None

    @contextmanager
    def during(self, steps: range, context: StepContext) -> Iterator[StepContext]:
        """Open while these steps are made, which are committed together; yields the context to make them in."""
        if steps[-1] < self._steps.start or steps[0] >= self._steps.stop:
            yield context
            return
        control = context.control
        self._of = self._of or self._start(steps[0], control)
        control.watch = watch = PhaseWatch(self._mark)
        try:
            with record_function(f"{PREFIX}step {steps[0]}"):
                yield replace(context, world=WatchedWorld(context.world, watch))
        finally:
            control.watch = None
            watch.close()
        # The host has waited in these steps for the passes, so a GPU is past all earlier ones.
        self._report()
        self._made.append((steps, watch))
        if self._device.type != "cuda":
            self._report()
        if steps[-1] + 1 >= self._steps.stop:
            self.stop(control)

    def stop(self, control: Control) -> None:
        """End the trace, if one was begun, and write it on a thread."""
        if self._made:
            self._settle()
            self._report()
        profiler, self._profiler = self._profiler, None
        if profiler is None or self._of is None:
            return
        control.set_limit(LIMIT_S)
        control.enter("saving")
        try:
            profiler.stop()
        except Exception as error:
            self._failed("the trace could not be ended", error)
            return
        self._writer = threading.Thread(target=self._write, args=(profiler, self._of.trace), daemon=True)
        self._writer.start()

    def finish(self, control: Control) -> None:
        """End and write the trace; wait until it is written, but not for a storage that does not take it."""
        self.stop(control)
        if self._writer is None:
            return
        control.set_limit(LIMIT_S)
        control.enter("saving")
        self._writer.join(WRITE_S)
        if self._writer.is_alive():
            self._failed("the trace was not written", TimeoutError(f"the storage has not taken it in {WRITE_S:g} s"))

    def _start(self, step: int, control: Control) -> ProfiledWorker:
        """Begin a trace with this step, and return what is profiled."""
        control.set_limit(LIMIT_S)
        control.enter("preparing")
        of = self._describe(step)
        control.check()
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self._device.type == "cuda")]
        try:
            profiler = profile(activities=activities)
            profiler.start()
            self._profiler = profiler
        except Exception as error:
            self._failed("torch.profiler could not begin", error)
        control.check()
        return of

    def _report(self) -> None:
        """Report the steps that the device is past."""
        for steps, watch in self._made:
            (changes, end), count = watch.times(), len(steps)
            assert self._of is not None, "it was described before its steps"
            self._tell(
                Profiled(
                    step=steps[-1],
                    count=count,
                    seconds=(end - changes[0].time) / count,
                    phases={phase: seconds / count for phase, seconds in phase_seconds(changes, end).items()},
                    hidden_s=hidden_s(changes, end, watch.sums) / count,
                    of=self._of,
                )
            )
        self._made.clear()

    def _settle(self) -> None:
        """Wait until the device has computed the last steps."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _write(self, profiler: profile, name: str) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(file))
                self._write_file(name, file.read_bytes())
        except Exception as error:
            self._failed("the trace could not be written", error)

    def _failed(self, what: str, error: Exception) -> None:
        log.warning("%s", what, exc_info=error)
        self._tell(not_profiled(what, error))


def not_profiled(what: str, error: Exception) -> Remark:
    """Return that a part of the profile is missing."""
    return Remark(f"profile {what}", f"profile: {what}: {type(error).__name__}: {error}; the run is not affected")
