"""Which approach suits which size of a model, and how steps scale, as tables for `jobs/parallel.md`, by the planner.

As a module: prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Job, Parallel, Workers
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.parallel.pipeline.memory import Misfit
from raytrain_plus.planner.cost import CostModel
from raytrain_plus.planner.layer_profile import LinkSpeed
from raytrain_plus.planner.plan_table import SizePlan, choice_text
from raytrain_plus.planner.search import plan_sizes
from raytrain_plus.planner.space import Choice, FreeSettings
from raytrain_plus.planner.transformer import A100, Gpt, Gpus, gpt_profile
from raytrain_plus.storage.size_text import size_text

GPTS = {
    "0.4 billion": Gpt(blocks=24, width=1024),
    "1.4 billion": Gpt(blocks=24, width=2048),
    "6.8 billion": Gpt(blocks=32, width=4096),
    "40 billion": Gpt(blocks=48, width=8192),
    "530 billion": Gpt(blocks=105, width=20_480),
}
"""Models by their number of parameters."""
WORKERS = (8, 64, 1024)
ROOM = 80e9
"""Bytes of a GPU's memory."""
LINKS = {"1 Gbit/s": 0.125e9, "10 Gbit/s": 1.25e9, "25 Gbit/s": 3.125e9, "200 Gbit/s": 25e9}
"""Bytes per second of each GPU's link to other machines, with 20 us of latency."""
SCALED = (8, 64, 512)
PLAIN = FreeSettings("none", "none", "none", "1f1b")


def gpt_job(shards: int, rows: int, tensor: int = 1) -> Job:
    """Return a job on GPUs in bfloat16, with so many rows in each shard, one a microbatch."""
    return Job(
        name="gpt",
        task="module:Task",
        data=Data(path="rows", batch_size=shards * rows, shards=shards),
        steps=1,
        workers=Workers(gpus=1),
        parallel=Parallel(microbatches=rows, tensor=tensor),
        precision="bf16-params",
    )


def approaches() -> str:
    """Return Markdown: for each size of a model, the planned choice on so many A100, and its MFU."""
    rows = [[name, *(_planned(gpt, workers) for workers in WORKERS)] for name, gpt in GPTS.items()]
    return _table(["parameters", *(f"{workers:,} GPUs" for workers in WORKERS)], rows)


def _planned(gpt: Gpt, workers: int) -> str:
    """Return the faster plan: with whole layers, or with eight slices."""
    found: list[SizePlan] = []
    for tensor in (1, 8):
        job = gpt_job(64, 16, tensor)
        row = plan_sizes(job, gpt_profile(gpt), [workers], lambda _: ROOM).at(workers)
        found += [row] if isinstance(row, SizePlan) else []
    if not found:
        return "does not fit"
    best = min(found, key=lambda row: row.cost.time.total)
    return f"{choice_text(best.choice)}: {100 * (best.mfu or 0):.0f} %"


def scaling() -> str:
    """Return Markdown: by link, the share of a perfect speed-up with more replicas of 1.4 billion parameters.

    Strong: the same 1,024 rows of a step. Weak: 16 rows for each GPU.
    """
    rows = []
    for name, per_s in LINKS.items():
        gpus = replace(A100, link=LinkSpeed(A100.link.latency_s, per_s))
        costs = {}
        for workers in SCALED:
            strong, weak = gpt_job(512, 2), gpt_job(workers, 16)
            costs[workers] = [_seconds(job, gpus, workers) for job in (strong, weak)]
        alone = [_seconds(job, gpus, 1) for job in (gpt_job(512, 2), gpt_job(1, 16))]
        rows.append(
            [
                name,
                *(f"{100 * alone[0] / workers / costs[workers][0]:.0f} %" for workers in SCALED),
                *(f"{100 * alone[1] / costs[workers][1]:.0f} %" for workers in SCALED),
            ]
        )
    return _table(["link", *(f"strong, {n}" for n in SCALED), *(f"weak, {n}" for n in SCALED)], rows)


def _seconds(job: Job, gpus: Gpus, workers: int) -> float:
    found = CostModel(job, gpt_profile(GPTS["1.4 billion"], gpus)).of(Choice(Shape(workers), PLAIN), float("inf"))
    assert not isinstance(found, Misfit)
    return found.time.total


def largest() -> Iterator[str]:
    """Yield sentences on 530 billion parameters as published: 32 replicas of 4 stages of 8 GPUs, ZeRO-1, 1,536 rows."""
    profile = gpt_profile(GPTS["530 billion"])
    sliced, whole = (
        replace(job, parallel=replace(job.parallel, holders=1)) for job in (gpt_job(32, 48, 8), gpt_job(1024, 1))
    )
    for job, shape, settings in (
        (sliced, Shape(32, 4, 8), FreeSettings("optimizer", "full", "none", "1f1b")),
        (whole, Shape(1024), FreeSettings("full", "full", "none", "1f1b")),
    ):
        choice = Choice(shape, settings)
        found = CostModel(job, profile).of(choice, float("inf"))
        assert not isinstance(found, Misfit)
        yield f"{choice_text(choice)}: {size_text(found.memory.total)} on each GPU"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(approaches(), scaling(), *(f"- {line}" for line in largest()), sep="\n\n")
