"""What `validate` says that a run promises: no more than the settings give, and which setting would give more."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_plus import Checkpoint, Data, Elastic, Job, Parallel, Workers
from raytrain_plus.checks.promises import promises_of
from raytrain_plus.parallel.sizing import size_table

BACK = "the run goes back to its newest checkpoint (one every 600 s)"
LIVES = " while another one lives"
COPIES = f"the run goes back to copies in other workers' memory, of each step; if these are lost too, {BACK}"
ROUNDED = "equal results on any number of workers, to"


def promised(
    workers: Workers | None = None, parallel: Parallel | None = None, data: dict[str, Any] | None = None, **given: Any
) -> tuple[str, ...]:
    inexact = given.pop("inexact", "")
    source = data if data and "mix" in data else {"path": "rows", **(data or {})}
    job = Job(
        name="x",
        task="a:B",
        data=Data(**{"batch_size": 48, "shards": 12, **source}),
        steps=3,
        workers=workers or Workers(min=1, max=4),
        parallel=parallel or Parallel(),
        **given,
    )
    return promises_of(job, size_table(job), inexact)


def test_the_plainest_job() -> None:
    assert promised() == (
        f"the loss of a worker costs no step{LIVES}; if all are lost at once, {BACK}",
        "every row is used once in an epoch, whatever is lost: raytrain audit checks it",
        f"{ROUNDED} rounding; with reduction: exact equal bits",
    )


@pytest.mark.parametrize(
    ("workers", "parallel", "said"),
    [
        (
            Workers(),
            Parallel(),
            f"if its only worker is lost, {BACK}; with workers.max: 2 the loss of a worker costs no step",
        ),
        (
            Workers(min=1, max=4),
            Parallel(sharded="optimizer"),
            f"the loss of a worker costs no step{LIVES}; if both holders of a row are lost at once, {BACK}",
        ),
        (
            Workers(min=3, max=4),
            Parallel(sharded="full", holders=3),
            f"losses of 2 workers cost no step{LIVES}; if all 3 holders of a row are lost at once, {BACK}",
        ),
        (
            Workers(min=2, max=4),
            Parallel(sharded="optimizer", holders=1),
            f"after the loss of any worker, {BACK}; with parallel.holders: 2 it costs no step",
        ),
        (
            Workers(min=2, max=4),
            Parallel(pipeline=2, sharded="optimizer"),
            f"the loss of a worker costs no step{LIVES}; if both holders of a row are lost at once, {BACK}; the stages "
            "of a single replica are copied to other workers",
        ),
        (
            Workers(min=1, max=4),
            Parallel(pipeline=2),
            f"the loss of a worker costs no step while another replica is whole; else {COPIES}",
        ),
        (
            Workers(min=1, max=2),
            Parallel(tensor=2),
            f"after the loss of a worker, {COPIES}; with workers.max: 4 there are two replicas, and it costs no step",
        ),
        (
            Workers(min=2, max=4),
            Parallel(pipeline=2, schedule="pipedream", commit_every=8),
            "after the loss of a worker, up to 8 steps are computed again (parallel.commit_every) while another "
            f"replica is whole; else {COPIES}; other schedules than pipedream repeat fewer, or none",
        ),
    ],
)
def test_what_losses_cost(workers: Workers, parallel: Parallel, said: str) -> None:
    assert promised(workers, parallel)[0] == said


def test_a_single_shard_needs_a_second_one_before_another_worker_helps() -> None:
    assert "with workers.max: 2 and data.shards: 2 the loss" in promised(Workers(), data={"shards": 1})[0]


def test_copies_that_are_made_less_often() -> None:
    said = promised(Workers(min=2, max=2), Parallel(pipeline=2), elastic=Elastic(copy_every=5))[0]
    assert "copies in other workers' memory, of every 5 steps;" in said


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (Checkpoint(every_steps=200), "its newest checkpoint (one every 200 steps and every 600 s)"),
        (Checkpoint(every_steps=1, every_s=None), "its newest checkpoint (one every 1 step)"),
        (Checkpoint(every_s=None), "its beginning (checkpoint.every_s and every_steps are null)"),
    ],
)
def test_how_far_the_newest_checkpoint_is(checkpoint: Checkpoint, said: str) -> None:
    assert promised(checkpoint=checkpoint)[0].endswith(said)


def test_rows_of_a_mix_and_rows_that_are_skipped() -> None:
    mix = {"mix": [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]}
    assert promised(data=mix)[1].startswith("every row of a source is used once in an epoch of that source, whatever")
    assert promised(data={"on_error": "skip"})[1].endswith("; rows that cannot be used are left out, and counted")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reduction": "exact"}, "equal bits on any number of workers, whatever is lost (reduction: exact)"),
        (
            {"compression": "bf16"},
            f"{ROUNDED} the rounding of compression: bf16; with reduction: exact, without compression, equal bits",
        ),
        (
            {"inexact": "the parameter 'out' is bfloat16"},
            f"{ROUNDED} rounding; equal bits are not offered: the parameter 'out' is bfloat16",
        ),
        (
            {"data": {"batch_size": 8192, "shards": 8192}},
            f"{ROUNDED} rounding; equal bits are not offered: data.shards = 8192 is too many for an exact sum",
        ),
        (
            {"workers": Workers(min=2), "parallel": Parallel(pipeline=2, schedule="pipedream")},
            "results depend on the number of replicas, and on losses: gradients belong to older weights "
            "(parallel.schedule: pipedream)",
        ),
    ],
)
def test_which_bits_are_equal(given: dict[str, Any], said: str) -> None:
    assert promised(**given)[2] == said
