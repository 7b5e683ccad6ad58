"""All members agree on the steps that are committed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from raytrain_plus.data.reader import Microbatch
from raytrain_plus.training.loop import Evaluation, Window, steps_end


class Saving:
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
    window = Window(every=every, counted=lambda step: {})
    evaluation = None if evaluated is None else Evaluation(every_steps=evaluated, batches=nothing)
    found, step = [], first
    while step < 10:
        found.append(steps_end(step, 10, window, evaluation, Saving(saved)))
        step = found[-1] + 1
    assert found == ends
    assert steps_end(3, 10, None, evaluation, Saving(saved)) == 3
