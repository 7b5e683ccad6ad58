"""Profiled steps: what is measured, what becomes of failures, and that the training is the same."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.device_clock import Mark
from raytrain_plus.errors import Interrupted
from raytrain_plus.observe.step_profile import PHASES, Change, Profiled, ProfiledWorker, Sum
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.step_records import Remark
from raytrain_plus.training.profile import profiling
from raytrain_plus.training.profile.phase_watch import PhaseWatch, WatchedWorld
from raytrain_plus.training.profile.profiling import Profiling
from raytrain_plus.training.step.build import whole_steps
from tests.support.exact_steps import SHARDS, Small, batches, sha, state_of
from tests.unit.training.group import context

CPU = torch.device("cpu")


@dataclass
class Kept:
    """What a profile reports and writes."""

    told: list[Any] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    described: list[int] = field(default_factory=list)

    def of_worker(self, step: int) -> ProfiledWorker:
        self.described.append(step)
        return ProfiledWorker(seat=0, device="a CPU", trace=f"from-{step}", operations=1, peak=None)

    def of(self, steps: range) -> Profiling:
        return Profiling(steps, CPU, describe=self.of_worker, write=self.files.__setitem__, tell=self.told.append)


def trained(profiled: Profiling | None, last: int = 5) -> str:
    """Make the steps up to `last`, and return the hash of the state."""
    state = state_of(Small())
    steps, given, hosted = whole_steps(state), context(SoloWorld()), partial(batches, hosted=range(SHARDS))
    for step in range(last + 1):
        if profiled is None:
            steps.make(range(step, step + 1), hosted, given)
        else:
            with profiled.during(range(step, step + 1), given) as watched:
                steps.make(range(step, step + 1), hosted, watched)
    if profiled is not None:
        profiled.finish(given.control)
    return sha(state)


def ranges(trace: bytes) -> list[str]:
    """Return the names of the phases in a trace."""
    events = json.loads(trace)["traceEvents"]
    names = {event["name"] for event in events if str(event["name"]).startswith("raytrain_plus.")}
    return sorted(name.removeprefix("raytrain_plus.") for name in names)


def test_the_steps_of_the_range_are_profiled_and_the_state_is_the_same() -> None:
    kept = Kept()
    assert trained(kept.of(range(2, 4))) == trained(None)
    assert [one.step for one in kept.told] == [2, 3]
    assert kept.described == [2]
    for one in kept.told:
        assert {"forward", "backward", "exposed", "optimizer", "rest"} <= one.phases.keys() <= set(PHASES)
        assert sum(one.phases.values()) == pytest.approx(one.seconds)
    [(name, trace)] = kept.files.items()
    assert name == "from-2"
    assert ranges(trace) == ["backward", "exposed", "forward", "optimizer", "rest", "step 2", "step 3"]


def test_the_end_of_the_range_writes_the_trace_while_the_training_continues() -> None:
    written = threading.Event()
    kept = Kept()
    one = kept.of(range(1))
    one._write_file = lambda name, data: written.set()
    given = context(SoloWorld())
    with one.during(range(1), given):
        pass
    assert written.wait(30)
    with one.during(range(1, 2), given) as used:
        assert used is given


def test_an_interrupted_step_is_not_reported_and_the_trace_up_to_it_is_written() -> None:
    kept = Kept()
    one, given = kept.of(range(4)), context(SoloWorld())
    with one.during(range(1), given):
        pass
    given.control.interrupt(0)
    with pytest.raises(Interrupted), one.during(range(1, 2), given):
        given.control.check()
    assert given.control.watch is None
    one.finish(given.control)
    assert [told.step for told in kept.told] == [0]
    assert ranges(kept.files["from-0"]) == ["rest", "step 0", "step 1"]


@pytest.mark.parametrize("broken", ["start", "stop", pytest.param("export_chrome_trace", marks=pytest.mark.slow)])
def test_a_failing_profiler_is_a_remark_and_the_times_are_there(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no CUPTI")

    stops = profiling.profile.stop
    monkeypatch.setattr(profiling.profile, broken, fail)
    if broken == "stop":
        monkeypatch.setattr(profiling.profile, "stop", lambda self: (stops(self), fail()))
    kept = Kept()
    assert trained(kept.of(range(2, 4))) == trained(None)
    steps = [one.step for one in kept.told if isinstance(one, Profiled)]
    remarks = [one.text for one in kept.told if isinstance(one, Remark)]
    assert (steps, kept.files) == ([2, 3], {})
    assert len(remarks) == 1
    assert "RuntimeError: no CUPTI; the run is not affected" in remarks[0]


def test_steps_made_together_report_their_mean() -> None:
    kept = Kept()
    one, given = kept.of(range(3, 5)), context(SoloWorld())
    for steps in (range(3), range(2, 6), range(6, 9)):
        with one.during(steps, given):
            pass
    [told] = kept.told
    assert (told.step, told.count, told.seconds) == (5, 4, pytest.approx(sum(told.phases.values())))
    one.finish(given.control)


@dataclass
class Later:
    """A sum that has ended when it was asked `looks` times, and the one that follows it."""

    looks: int
    follows: Later | None = None

    def ended(self, within_s: float) -> bool:
        self.looks -= 1
        return self.looks < 0

    def finish(self) -> Later | None:
        return self.follows


class Slow(SoloWorld):
    def reduce(self, tensor: torch.Tensor, name: str, operation: Any = "sum") -> Any:
        return Later(1, Later(0))


def test_a_watch_records_phases_and_how_long_sums_are_under_way() -> None:
    ticks = itertools.count()

    def clock() -> float:
        return float(next(ticks))

    watch = PhaseWatch(lambda: Mark(clock()), clock)
    given: StepContext = context(WatchedWorld(Slow(), watch))
    given.control.watch = watch
    given.control.enter("computing", "backward")
    work = given.world.reduce(torch.zeros(1), "a")
    # The first look finds nothing; the second one is at the end of the backward pass.
    given.control.check()
    given.control.enter("collective")
    given.wait([work], "a sum")
    watch.close()
    changes = [
        Change(0.0, "rest"), Change(1.0, "backward"), Change(4.0, "rest"), Change(5.0, "exposed"), Change(8.0, "rest")
    ]  # fmt: skip
    assert watch.times() == (changes, 9.0)
    assert watch.sums == [Sum(2.0, 3.0), Sum(6.0, 7.0)]


class GpuEvent:
    """A moment on a GPU, in seconds, which the GPU is past."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: GpuEvent) -> float:
        return 1000.0 * (end_event.at - self.at)


def test_phases_of_a_gpu_take_the_time_that_it_computes_not_that_of_the_requests() -> None:
    # The host requests the passes in 2 s, and reads the sums until 10 s, when the GPU has computed the passes.
    moments = iter([(0.0, 100.0), (1.0, 101.0), (2.0, 104.0), (10.0, 110.0), (11.0, 112.0)])

    def mark() -> Mark:
        host, at = next(moments)
        return Mark(host, GpuEvent(at))  # type: ignore[arg-type]

    watch = PhaseWatch(mark)
    for phase in ("forward", "backward", "optimizer"):
        watch.enter(phase)  # type: ignore[arg-type]
    watch.close()
    changes = [Change(0.0, "rest"), Change(1.0, "forward"), Change(4.0, "backward"), Change(10.0, "optimizer")]
    assert watch.times() == (changes, 12.0)


def test_a_step_of_a_gpu_is_reported_when_the_next_one_has_read_its_sums() -> None:
    kept = Kept()
    one, given = kept.of(range(3)), context(SoloWorld())
    settled: list[int] = []
    one._start = lambda step, control: kept.of_worker(step)  # type: ignore[method-assign]
    one._device = torch.device("cuda")
    one._settle = lambda: settled.append(len(kept.told))  # type: ignore[method-assign]
    profiled = []
    for step in range(3):
        with one.during(range(step, step + 1), given):
            pass
        profiled.append([told.step for told in kept.told if isinstance(told, Profiled)])
    one.finish(given.control)
    assert profiled == [[], [0], [0, 1, 2]]
    assert settled == [2]
