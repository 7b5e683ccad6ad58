"""All members agree on the steps that are committed together, and on what happens between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_plus import KeepBest
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import World
from raytrain_plus.data.reading.microbatches import Microbatch, StepBatches
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.early_stop import Evaluations
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.step.loop import Companions, Evaluation, Span, StepTimeouts, last_together, train


class CheckpointWriter:
    """A checkpoint after every `every` steps."""

    def __init__(self, every: int | None) -> None:
        self.due: Callable[[int, bool], bool] = lambda step, evaluated: every is not None and (step + 1) % every == 0

    def busy(self) -> bool:
        return False

    def copy(self, step: int, metrics: object) -> None:
        raise AssertionError


def nothing(shard: int) -> Iterator[Microbatch]:
    return iter(())


@pytest.mark.parametrize(
    ("first", "every", "evaluated", "saved", "ends"),
    [
        (0, 4, None, None, [3, 7, 9]),
        (2, 4, None, None, [3, 7, 9]),
        (0, 4, 3, None, [2, 3, 5, 7, 8, 9]),
        (0, 16, None, 5, [4, 9]),
        (0, 1, None, None, list(range(10))),
    ],
)
def test_overlapping_steps_end_together(
    first: int, every: int, evaluated: int | None, saved: int | None, ends: list[int]
) -> None:
    evaluation = None if evaluated is None else Evaluation(every_steps=evaluated, batches=nothing)
    found, step = [], first
    while step < 10:
        found.append(last_together(step, 10, every, evaluation, CheckpointWriter(saved)))
        step = found[-1] + 1
    assert found == ends
    assert last_together(3, 10, 1, evaluation, CheckpointWriter(saved)) == 3


class Steps:
    """They only note what they are given."""

    every, begun = 1, -1
    state: Any = None

    def __init__(self, done: list[str], act: Callable[[int], None] = lambda step: None) -> None:
        self.passes: Any = SimpleNamespace(bars=())
        self._done, self._act = done, act

    def make(self, steps: range, batches: Any, context: StepContext) -> list[Applied]:
        [step] = steps
        batches(step)
        self._act(step)
        context.meanwhile()
        self._done.append(f"step {step}")
        return [Applied(rows=1, loss=0.5, flags=context.flags(), notes=b"", grad_norm=1.0, reduce_s=0.0)]

    def complete(self, context: StepContext) -> None:
        """Nothing is sharded."""


class Feed:
    def __init__(self) -> None:
        self.more_calls = 0

    def get(self, step: int, timeout_s: float, check: Callable[[], None]) -> StepBatches:
        return StepBatches({}, 0.0)

    def more(self) -> None:
        self.more_calls += 1


class Saves:
    """Saves after every fourth step; busy as long as `writing`."""

    def __init__(self, done: list[str]) -> None:
        self._done, self.writing = done, 0

    def busy(self) -> bool:
        self.writing -= 1
        return self.writing >= 0

    def check(self) -> None:
        pass

    def due(self, step: int, evaluated: bool) -> bool:
        return (step + 1) % 4 == 0

    def copy(self, step: int, metrics: object) -> None:
        self._done.append(f"save {step}")


class Copies:
    def __init__(self, done: list[str], ready: bool = True) -> None:
        self._done, self._ready = done, ready

    def ready(self) -> bool:
        return self._ready

    def due(self, step: int) -> bool:
        return step % 3 == 0

    def copy(self, step: int, check: Callable[[], None]) -> None:
        self._done.append(f"copy {step}")


def trained(
    done: list[str],
    control: Control,
    act: Callable[[int], None] = lambda step: None,
    writing: int = 0,
    world: World | None = None,
    **given: Any,
) -> tuple[str, Feed]:
    """Train up to step 5, and return how that ended."""
    feed, saves = Feed(), Saves(done)
    saves.writing = writing
    why = train(
        Steps(done, act),
        Span(first_step=1, end=6, hosted=(0,), shards=1),
        (SoloWorld() if world is None else world, None),
        Companions(
            feed=feed,
            saving=saves,
            copying=Copies(done, **given),
            tell=lambda record: done.append(f"told {record.step}"),
        ),
        evaluation=None,
        evaluations=Evaluations(None, {}),
        timeouts=StepTimeouts(step_s=1.0, first_step_s=2.0, wait_s=1.0),
        control=control,
    )
    return why, feed


def begun() -> Control:
    control = Control()
    control.begin(0)
    return control


def test_a_step_is_reported_then_copied_then_saved_but_the_last_is_not_saved() -> None:
    done: list[str] = []
    why, feed = trained(done, begun())
    each = [[f"step {step}", f"told {step}"] for step in range(1, 6)]
    assert done == ["copy 0", *each[0], *each[1], *each[2], "copy 3", "save 3", *each[3], *each[4]]
    assert (why, feed.more_calls) == ("finished", 5)


def test_another_way_to_sum_is_used_after_the_first_step_in_which_all_are_ready() -> None:
    done: list[str] = []

    class Forming(SoloWorld):
        ready = False

        @property
        def forming(self) -> bool:  # type: ignore[override]
            return not self.ready

        def use_formed(self) -> None:
            done.append("switch")

    def act(step: int) -> None:
        world.ready = step >= 3

    world = Forming()
    trained(done, begun(), act, world=world)
    assert [one for one in done if one.startswith(("step", "switch"))] == [
        *("step 1", "step 2", "step 3", "switch", "step 4", "switch", "step 5", "switch")
    ]


def test_a_member_that_cannot_copy_copies_nothing() -> None:
    done: list[str] = []
    trained(done, begun(), ready=False)
    assert not [one for one in done if one.startswith("copy")]


def test_a_pause_ends_the_training_at_the_boundary_after_a_save() -> None:
    done: list[str] = []
    control = begun()
    why, _ = trained(done, control, lambda step: control.pause(0) if step == 3 else None)
    assert (why, done[-3:]) == ("paused", ["told 3", "copy 3", "save 3"])


def test_a_save_while_an_earlier_one_is_written_is_made_at_a_later_boundary() -> None:
    done: list[str] = []
    control = begun()
    # Steps 1 to 3 see that a share is still being written.
    trained(done, control, writing=3)
    assert [one for one in done if one.startswith("save")] == ["save 4"]
    assert not control.save_requested()


class Keeps(Saves):
    """Saves what is evaluated; a checkpoint is in progress for `takes` looks."""

    def __init__(self, done: list[str], takes: int) -> None:
        super().__init__(done)
        self.takes = takes
        self.metrics: dict[int, object] = {}

    def due(self, step: int, evaluated: bool) -> bool:
        return evaluated

    def wait(self, check: Callable[[], None]) -> None:
        while self.busy():
            check()
        self._done.append("wait")

    def copy(self, step: int, metrics: object) -> None:
        super().copy(step, metrics)
        self.metrics[step] = metrics
        self.writing = self.takes


def kept(known: dict[int, dict[str, float]], first_step: int, saved: bool = False, takes: int = 2) -> list[str]:
    """Train from that step to step 5 under `keep_best`, with known evaluations; return what is saved and waited for."""
    done: list[str] = []
    saves = Keeps(done, takes)
    train(
        Steps(done),
        Span(first_step=first_step, end=6, hosted=(0,), shards=1, saved=saved),
        (SoloWorld(), None),
        Companions(feed=Feed(), saving=saves, copying=Copies(done, ready=False), tell=lambda record: None),
        evaluation=None,
        evaluations=Evaluations(KeepBest(metric="m"), known),
        timeouts=StepTimeouts(step_s=1.0, first_step_s=2.0, wait_s=1.0),
        control=begun(),
    )
    assert all(saves.metrics[step] == known[step] for step in saves.metrics)
    return done


def test_a_best_state_is_saved_before_the_next_step_and_waits_for_an_earlier_checkpoint() -> None:
    known = {1: {"m": 2.0}, 2: {"m": 3.0}, 3: {"m": 1.0}}
    # Step 2 is no better: it is saved at a boundary at which nothing is in progress.
    assert kept(known, 1, takes=2) == [
        *("step 1", "wait", "save 1", "wait"),
        *("step 2", "save 2", "step 3", "wait", "save 3", "wait"),
        *("step 4", "step 5"),
    ]


def test_the_state_that_a_generation_begins_with_is_saved_if_it_is_the_best_and_is_not_saved() -> None:
    known = {1: {"m": 2.0}, 2: {"m": 1.0}}
    steps = ["step 3", "step 4", "step 5"]
    assert kept(known, 3) == ["wait", "save 2", "wait", *steps]
    assert kept(known, 3, saved=True) == steps
    assert kept({**known, 2: {"m": 9.0}}, 3) == steps
