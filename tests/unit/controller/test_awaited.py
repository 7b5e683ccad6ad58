"""What a run with too few workers says that it waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from raytrain_plus.controller.roster.awaited import awaited
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Group, Limits, WorkerStatus
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.membership.state_machine import step

RAISE = "raise elastic.wait_s if the machines are busy or slow to start"
STARTS = "Ray has not started, with all that it imports, the process of"
GROUP = Group(limits=Limits(sizes=SizeTable(2, 3, 3), spares=0, steps=4, max_failures=None, expected=2))


@pytest.mark.parametrize(
    ("states", "homeless", "said", "remedy"),
    [
        (["coming", "coming"], "", f"within elastic.wait_s: {STARTS} 2 workers", RAISE),
        (
            ["coming", "coming"],
            "b",
            f"within elastic.wait_s: Ray has found no room for 1 worker and {STARTS} 1 worker",
            f"free resources or add machines, or {RAISE}",
        ),
        (["idle", "warming_up"], "", "within elastic.wait_s: a warm-up step has not ended on 1 worker", RAISE),
        (["up", "idle"], "b", "within 600 s: the task, its data and its model are not yet prepared on 1 worker", ""),
        (["idle"], "", "within elastic.wait_s", RAISE),
    ],
)
def test_what_a_run_with_too_few_workers_waited_for(
    states: list[Literal["coming", "up", "warming_up", "idle"]], homeless: str, said: str, remedy: str
) -> None:
    workers = {name: WorkerStatus(state) for name, state in zip("abc", states, strict=False)}
    assert awaited(replace(GROUP, workers=workers), set(homeless)) == (said, remedy)


def test_it_stands_in_the_failure() -> None:
    group = replace(GROUP, workers={"a": WorkerStatus("coming")})
    group, _ = step(group, e.Late(-1, *awaited(group, set())))
    assert group.failure == (
        f"only 0 of at least 2 workers were available within elastic.wait_s: {STARTS} 1 worker\n  fix: {RAISE}"
    )
