"""A worker reads what its stage needs, and reads nothing twice."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raytrain_plus import Task
from raytrain_plus.job.settings import Evaluate
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.workers.messages import Plan
from raytrain_plus.workers.preparation.feeds import Feeds
from tests.support.exact_steps import SHARDS
from tests.unit.workers.members import plan_of

FIRST, SECOND = Stage(0, 2), Stage(1, 2)


class Plain(Task):
    """Needs no model here."""


def feeds_of(plan: Plan) -> Feeds:
    return Feeds(plan, Plain().collate, None)


def with_evaluation(plan: Plan) -> Plan:
    return replace(plan, job=replace(plan.job, evaluate=Evaluate(path="held_out", every_steps=3)))


def test_batches_of_the_next_generation_come_from_what_is_in_memory(tmp_path: Path) -> None:
    feeds = feeds_of(plan_of(tmp_path))
    with feeds.batches(range(SHARDS), 0, stream=False) as first:
        read = first.get(0, 10).shards
        later = first.get(1, 10).shards
    assert read.keys() == set(range(SHARDS))
    [microbatch] = read[0]
    assert torch.equal(microbatch.batch["x"], feeds.first().batch["x"])
    (tmp_path / "data" / "a.parquet").unlink()
    with feeds.batches((3,), 1, stream=False) as second:
        [again] = second.get(1, 10).shards[3]
    assert torch.equal(again.batch["x"], later[3][0].batch["x"])


def test_only_the_first_stage_reads_data(tmp_path: Path) -> None:
    feeds = feeds_of(plan_of(tmp_path))
    (tmp_path / "data" / "a.parquet").unlink()
    with ExitStack() as stack:
        [microbatch] = feeds.of_member(SECOND, (3,), 0, stack).get(0, 1, lambda: None).shards[3]
    assert (microbatch.batch, microbatch.rows) == (None, 4)


def test_only_the_first_stage_reads_the_held_out_data(tmp_path: Path) -> None:
    feeds = feeds_of(with_evaluation(plan_of(tmp_path)))
    whole, later = feeds.evaluation(FIRST), feeds.evaluation(SECOND)
    assert whole is not None
    assert later is not None
    read, counted = list(whole.batches(3)), list(later.batches(3))
    assert [microbatch.rows for microbatch in read] == [microbatch.rows for microbatch in counted] == [4, 4]
    assert [len(microbatch.batch["x"]) for microbatch in read] == [4, 4]
    assert [microbatch.batch for microbatch in counted] == [None, None]
    assert whole.every_steps == later.every_steps == 3


@pytest.mark.parametrize("stage", [FIRST, SECOND])
def test_a_job_without_evaluation_has_none_in_any_stage(tmp_path: Path, stage: Stage) -> None:
    plan = plan_of(tmp_path)
    assert feeds_of(plan).evaluation(stage) is None
    assert feeds_of(replace(with_evaluation(plan), held_out=None)).evaluation(stage) is None


def test_the_rows_of_a_step_are_counted_without_reading(tmp_path: Path) -> None:
    counted = feeds_of(plan_of(tmp_path)).counted((3,))
    assert [microbatch.rows for microbatch in counted(0)[3]] == [4]
