"""Eight minutes of losses: nothing is lost, no bit differs, and no process grows."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from raytrain_plus import Data, Workers
from raytrain_plus.audit.audit import audit
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data

SPAN_S = 480.0
PERIOD_S = 10.0
"""Seconds from one kill to the next."""
STEPS_PER_S = 6
PAD_S = 0.06
"""Seconds that each of two shards sleeps in a step of four workers: most of the step's time."""
WARM_STEPS = 1100
"""Steps in which a process loads what it uses for the first time, for example at its first losses, and fills its
buffers: the largest, a part of the ledger, takes a thousand steps."""
WARM_KILLS = 60
"""Losses in which malloc's arenas, one for each of Ray's threads, take the room that a loss needs in each. Meanwhile
Ray's own buffers fill: an actor that does nothing grows by 5 to 8 MB in its first 40,000 calls, and not after them."""
GROWTH = 0.02


@pytest.fixture
def five() -> Iterator[None]:
    ray.init(address="local", num_cpus=5, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def memory_of(pid: int) -> int:
    """Return the bytes that the process holds in memory."""
    return int(psutil.Process(pid).memory_info().rss)


def controller() -> int:
    commands = {one.pid: one.info["cmdline"] or [""] for one in psutil.process_iter(["cmdline"])}
    [found] = [pid for pid, command in commands.items() if command[0].startswith("ray::Controller")]
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("five")
def test_eight_minutes_with_a_kill_every_ten_seconds(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=4000)
    settings: dict[str, Any] = {
        "steps": int((WARM_KILLS * PERIOD_S + SPAN_S) * STEPS_PER_S),
        "reduction": "exact",
        "data": Data(path=str(tmp_path / "data"), batch_size=48, shards=8),
    }
    undisturbed = Run(job(tmp_path, name="undisturbed", workers=Workers(min=1), **settings)).finish(400)
    assert undisturbed.status == "finished", undisturbed.error

    run = Run(job(tmp_path, workers=Workers(min=1, max=4), args={"pad_s": PAD_S}, **settings))
    kept = run.until_size(4)[0]
    pids = {"controller": controller(), "worker": kept["pid"]}
    began, chance = time.monotonic(), random.Random(0)
    held: list[dict[str, int]] = []
    kills = 0
    for number in itertools.count(1):
        time.sleep(max(0.0, began + number * PERIOD_S - time.monotonic()))
        if run.committed() >= settings["steps"] - 10 * STEPS_PER_S:
            break
        warm = run.committed() >= WARM_STEPS and kills >= WARM_KILLS
        if warm and len(held) <= SPAN_S / PERIOD_S:
            held.append({who: memory_of(pid) for who, pid in pids.items()})
        others = [member for member in run.members() if member["pid"] != kept["pid"]]
        # On a busy machine replacements take longer than a period.
        if others:
            run.kill(chance.choice(others))
            kills += 1
    result = run.finish()

    assert result.status == "finished", result.error
    lost = sum(event["steps_lost"] for event in run.events("recovered"))
    growth = {who: held[-1][who] / held[0][who] - 1 for who in pids}
    minutes = (time.monotonic() - began) / 60
    print(f"\n{kills} kills in {minutes:.1f} minutes, {result.steps} steps, {lost} lost; memory: {held}")
    assert kills > WARM_KILLS + 20
    assert (lost, result.steps, result.state_sha256) == (0, settings["steps"], undisturbed.state_sha256)
    assert len(run.events("worker_lost")) == kills
    assert len(run.losses()) == settings["steps"]
    found = audit(result.path)
    assert found.clean, found.faults
    assert all(share <= GROWTH for share in growth.values()), growth
