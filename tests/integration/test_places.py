"""A machine that does not see what the others see is named before a run starts."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import ray

from raytrain_plus import Workers, attach
from tests.integration.elastic import Run, job, raylets
from tests.integration.network import raylet
from tests.integration.tasks import write_data
from tests.support.commands import raytrain, until, write_job

POSSIBLE = os.geteuid() == 0 and shutil.which("unshare") is not None


def raylet_that_sees_another(folder: Path, address: str) -> AbstractContextManager[object]:
    """Start a Ray node of one CPU that has its own `folder`. Needs Linux and root."""
    return raylet(["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', folder], address)


@pytest.mark.slow
@pytest.mark.skipif(not POSSIBLE, reason="a machine with places of its own needs root and unshare")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["runs", "data"])
def test_what_a_machine_does_not_see(tmp_path: Path, place: str) -> None:
    write_data(tmp_path / "data")
    (tmp_path / "runs").mkdir()
    with raylets(1) as cluster, raylet_that_sees_another(tmp_path / place, cluster.address):
        until(lambda: ray.cluster_resources().get("CPU") == 2, "the second node")
        code, _, err = raytrain("run", write_job(tmp_path), "--address", cluster.address)
    told = {"runs": "sees a different directory, or none, at this path", "data": f"cannot read {tmp_path}/data/"}[place]
    assert (code, "the machine " in err, told in err) == (2, True, True), err
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.slow
@pytest.mark.skipif(not POSSIBLE, reason="a machine with places of its own needs root and unshare")
@pytest.mark.timeout(120)
def test_what_a_machine_that_joins_later_does_not_see(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    with raylets(1) as cluster:
        run = Run(job(tmp_path, args={"pad_s": 0.02}, workers=Workers(min=1, max=2), steps=5000))
        run.until_step(5)
        with raylet_that_sees_another(tmp_path / "runs", cluster.address):
            lost = run.until_told("worker_lost")
            assert "sees a different directory" in lost["cause"]
            at = run.committed()
            run.until_step(at + 5)
        assert {len(view["members"]) for view in run.events("view_formed")} == {1}
        assert ".probe-run" in os.listdir(tmp_path / "runs")
        attach(run.folder).stop()
        assert run.finish().status == "stopped"
    assert os.listdir(tmp_path / "runs") == ["run"]
