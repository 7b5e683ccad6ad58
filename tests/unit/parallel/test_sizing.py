"""Possible shapes of a job's group, and the messages about impossible ones."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Job, Parallel, Workers
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.parallel import sizing
from raytrain_plus.parallel.sizing import many_passes, most_workers, sharded_lines, size_table, unused_workers


def job(minimum: int, maximum: int, *, shards: int = 4, **parallel: Any) -> Job:
    return Job(
        name="one",
        task="a:B",
        data=Data(path="x", batch_size=8 * shards, shards=shards),
        steps=1,
        workers=Workers(min=minimum, max=maximum),
        parallel=Parallel(**{"microbatches": 4, **parallel}),
    )


@pytest.mark.parametrize(
    ("made", "counts"),
    [
        (job(1, 4), (1,)),
        (job(4, 8, pipeline=4), (4,)),
        (job(1, 8, pipeline=4), (4, 3, 2, 1)),
        (job(3, 8, pipeline=4), (4, 3)),
        # With fewer workers than the stages requested, there is one replica, which has all shards.
        (job(1, 16, pipeline=4), (4, 3, 2, 1)),
        # Three stages would divide 16 microbatches into 5 rounds.
        (job(1, 4, pipeline=4, schedule="interleaved"), (4, 2, 1)),
    ],
)
def test_fewer_stages_only_with_too_few_workers(made: Job, counts: tuple[int, ...]) -> None:
    assert size_table(made).stage_counts == counts


def test_each_number_of_workers_has_its_shape() -> None:
    made = job(1, 8, pipeline=2)
    shapes = size_table(made).formed
    assert [shapes[workers] for workers in (1, 2, 3, 4, 6, 8)] == [
        Shape(1, 1),
        Shape(1, 2),
        Shape(1, 2),
        Shape(2, 2),
        # Three replicas for four shards are no faster than two.
        Shape(2, 2),
        Shape(4, 2),
    ]


def test_never_more_than_one_replica_per_shard() -> None:
    made = job(2, 100, pipeline=2)
    assert most_workers(made) == 8
    said = unused_workers(size_table(made))
    assert said.startswith("at most 8 of workers.max = 100 are used: they make 4 replicas of 2 stages each, and with")
    assert (
        unused_workers(size_table(job(2, 5, pipeline=2)))
        == "at most 4 of workers.max = 5 are used: they make 2 replicas of 2 stages each"
    )
    assert unused_workers(size_table(job(2, 4, pipeline=2))) == ""


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(InputError, match=r"2 stages of zero-bubble need 4 layers, but the model has 3: a, b, c"):
        size_table(job(2, 2, pipeline=2, schedule="zero-bubble"), ("a", "b", "c"))
    assert size_table(job(2, 2, pipeline=2), ("a", "b", "c")).stage_counts == (2,)
    # Of the smaller numbers of stages, those with enough layers are left.
    assert size_table(job(1, 4, pipeline=3, schedule="gpipe"), ("a", "b", "c")).stage_counts == (3, 2, 1)


def test_fewer_microbatches_than_the_schedule_needs() -> None:
    with pytest.raises(InputError) as caught:
        size_table(job(4, 16, pipeline=4, microbatches=2))
    words = "1f1b needs at least as many microbatches per replica as stages: 4, not 2: with 3 replicas, one hosts 1 of"
    assert f"{words} the 4" in str(caught.value)
    assert size_table(job(4, 16, pipeline=4, microbatches=2, schedule="gpipe")).stage_counts == (4,)


def test_a_minimum_without_a_partition_is_reported() -> None:
    made = job(3, 4, pipeline=4, schedule="interleaved")
    assert size_table(made).stage_counts == (4,)
    assert unused_workers(size_table(made)).startswith("workers.min is treated as 4: with fewer workers, no partition")


def test_too_many_microbatches_per_replica_are_rejected() -> None:
    made = job(2, 2, pipeline=2, schedule="pipedream", microbatches=8, commit_every=10_000)
    with pytest.raises(InputError, match="a replica can run at most 65535 microbatches together"):
        size_table(made)


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (("embed", "blok1"), "parallel.partition: the model has no layer 'blok1'; the nearest name is 'block1'"),
        (("embed", "zz"), "the model has no layer 'zz'; the nearest name is '"),
        (("block0", "head"), "'block0' is not the model's first layer, which is 'embed'"),
        (("embed", "embed"), "'embed' is named twice"),
    ],
)
def test_a_partition_that_is_not_the_models_is_refused(names: tuple[str, ...], wrong: str) -> None:
    layers = ("embed", "block0", "block1", "head")
    made = job(1, 2, pipeline=2, partition=names)
    with pytest.raises(InputError, match=wrong):
        size_table(made, layers)
    assert size_table(job(1, 2, pipeline=2, partition=("embed", "head")), layers).stage_counts == (2, 1)


def test_names_out_of_order_are_refused() -> None:
    made = job(3, 3, pipeline=3, partition=("embed", "head", "block0"))
    with pytest.raises(InputError, match="'block0' does not come after 'head' in the model, but before it"):
        size_table(made, ("embed", "block0", "head"))


def test_many_more_shards_than_replicas_on_gpus_are_named() -> None:
    def told(replicas: int, gpus: float = 1, batch_size: int = 96, microbatches: int = 1) -> str:
        data = Data(path="rows", batch_size=batch_size, shards=12)
        parallel = Parallel(microbatches=microbatches)
        job = Job(name="x", task="t:T", data=data, steps=1, workers=Workers(gpus=gpus), parallel=parallel)
        return many_passes(job, replicas)

    assert (told(12), told(6), told(1, gpus=0)) == ("", "", "")
    assert told(4) == (
        "data.shards is 12, and the largest group has 4 model replicas: in each step a GPU makes 3 small passes, of "
        "8 rows, one after the other, which leaves it partly idle; with data.shards = 4 a pass has 24 rows"
    )
    # 5 does not divide the rows, and 6 does.
    assert told(5, microbatches=2).endswith("with data.shards = 6 a pass has 8 rows")
    assert "1 model replica: in each step a GPU makes 24 small passes, of 4 rows" in told(1, microbatches=2)


def test_the_examples_hold() -> None:
    assert doctest.testmod(sizing).failed == 0


def test_each_size_above_the_holders_has_a_smaller_share() -> None:
    [state] = sharded_lines(Parallel(sharded="optimizer", holders=3), [2, 3, 4, 12])
    assert state == "optimizer's state: all of it on each of 2 or 3 workers, 75 % on each of 4, 25 % on each of 12"
    assert sharded_lines(Parallel(), [2, 4]) == ()
