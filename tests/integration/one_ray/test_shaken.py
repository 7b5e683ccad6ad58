"""A transform that draws from the generators of its process, beside dropout: one hash on any workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_plus import Data, Evaluate, Job, Workers
from tests.integration.elastic import Run, ended
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]


@pytest.mark.slow
def test_it_has_the_same_numbers_on_one_worker_and_on_three_with_a_kill(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")

    def job(**changes: Any) -> Job:
        settings: dict[str, Any] = {
            "name": "run",
            "task": "tasks:Slow",
            "seed": 5,
            "data": Data(path=str(data), batch_size=48, shards=8, transform="tasks:shaken", granule=16),
            "evaluate": Evaluate(path=str(data), every_steps=10),
            "steps": 20,
            "reduction": "exact",
            "storage": str(tmp_path / "runs"),
        }
        return Job(**{**settings, **changes})

    expected = ended(Run(job(workers=Workers(min=1))))
    one = Run(job(name="killed", workers=Workers(min=1, max=3)))
    one.until_size(3)
    one.until_step(6)
    one.kill(one.members()[1])
    assert ended(one) == expected
