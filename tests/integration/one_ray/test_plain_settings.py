"""Settings of a user's own train alike on one worker and on three, of which one is killed: equal bits if exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_plus import Data, Evaluate, Job, Parallel, Workers
from tests.integration.elastic import Run, ended
from tests.integration.plain_settings import LOOPS
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

STEPS = 24
USUAL = ("clamped gradients", "clamped means", "tokens in microbatches")


def job(tmp_path: Path, setting: str, **changes: Any) -> Job:
    data = write_data(tmp_path / "data")
    loop = LOOPS[setting]
    settings: dict[str, Any] = {
        "name": "run",
        "task": "plain_settings:Beside",
        "seed": 5,
        "data": Data(path=str(data), batch_size=48, shards=8),
        "steps": STEPS,
        "clip_value": loop.clip_value,
        "clip_norm": loop.clip_norm,
        "parallel": Parallel(microbatches=loop.microbatches),
        "reduction": "exact",
        "evaluate": Evaluate(path=str(data), every_steps=STEPS // 2),
        "storage": str(tmp_path / "runs"),
        "args": {"setting": setting},
    }
    return Job(**{**settings, **changes})


@pytest.mark.parametrize(
    "setting", [pytest.param(one, marks=() if one in USUAL else pytest.mark.slow) for one in LOOPS]
)
def test_a_setting_has_one_hash_on_one_worker_and_on_three_with_a_kill(tmp_path: Path, setting: str) -> None:
    expected = ended(Run(job(tmp_path, setting, workers=Workers(min=1))))
    args = {"setting": setting, "pad_s": 0.004}
    one = Run(job(tmp_path, setting, name="killed", workers=Workers(min=1, max=3), args=args))
    one.until_size(3)
    one.until_step(STEPS // 3)
    one.kill(one.members()[1])
    assert ended(one) == expected


@pytest.mark.slow
@pytest.mark.parametrize("setting", LOOPS)
def test_a_setting_has_the_same_losses_on_a_ring(tmp_path: Path, setting: str) -> None:
    expected = ended(Run(job(tmp_path, setting, workers=Workers(min=1), reduction="ring")))
    ring = ended(Run(job(tmp_path, setting, name="ring", workers=Workers(min=3), reduction="ring")))
    assert ring[1] == pytest.approx(expected[1], rel=1e-4)
    assert ring[2] == pytest.approx(expected[2], rel=1e-4)
