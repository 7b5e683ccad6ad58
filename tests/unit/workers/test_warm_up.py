"""A warm-up step leaves no state behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raytrain_plus.data.reading.microbatches import StepBatches
from raytrain_plus.job.settings import Parallel, Workers
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.workers.warm_up import warm_up
from tests.support.exact_steps import SHARDS, batches
from tests.unit.workers.members import member


@contextlib.contextmanager
def read(shards: tuple[int, ...], first_step: int, *, stream: bool) -> Iterator[Any]:
    assert (shards, first_step, stream) == ((0,), 0, False)
    yield SimpleNamespace(get=lambda step, timeout_s: StepBatches(dict(batches(step, range(SHARDS))), 0.0))


def test_after_a_warm_up_step_a_worker_holds_no_state(tmp_path: Path) -> None:
    prepared = member(tmp_path, feeds=SimpleNamespace(batches=read))
    warm_up(prepared, Control())
    assert prepared.own.state.last_applied is None


def test_a_worker_that_has_measured_its_layers_is_warm(tmp_path: Path) -> None:
    prepared = member(tmp_path, feeds=None)
    job = replace(prepared.plan.job, parallel=Parallel(pipeline=2), workers=Workers(min=2))
    warm_up(replace(prepared, plan=replace(prepared.plan, job=job)), Control())
    assert prepared.own.state.last_applied == -1
