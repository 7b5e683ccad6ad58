"""A standby on a real node becomes the worker that replaces a killed one, and does not outlive the run."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from raytrain_plus import Workers
from raytrain_plus.data.audit import audit
from tests.integration.elastic import Run, born, job, raylets
from tests.integration.tasks import write_data

pytestmark = pytest.mark.timeout(120)


def workers_processes() -> set[int]:
    """Return the processes of workers and standbys on this machine."""
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "ray::WorkerActor" in " ".join(process.info["cmdline"] or ())
    }


def waits(process: int) -> bool:
    """Return whether a standby has imported what it needs: it uses no CPU any more."""
    return psutil.Process(process).cpu_percent(0.5) < 10


def test_a_standby_replaces_a_killed_worker(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    others = workers_processes()
    with raylets(1, cpus=2):
        run = Run(job(tmp_path, steps=400, args={"pad_s": 0.02}, workers=Workers(min=1, max=2)))
        before = born(run.until_size(2))
        [standby] = run.until(lambda: workers_processes() - others - set(before), "a standby")
        run.until(lambda: waits(standby), "a standby that waits")
        killed_at = time.time()
        run.kill(victim := run.members()[1])
        view = run.until(lambda: [e for e in run.events("view_formed")[1:] if len(e["members"]) == 2], "two members")[0]
        [kept, new] = view["members"]
        assert (kept["pid"] in before, new["pid"]) == (True, standby)
        assert new["worker"] not in (victim["worker"], kept["worker"])
        assert view["time"] - killed_at < 5
        result = run.finish()
        assert result.recoveries == 1
        found = audit(result.path)
        assert found.clean, found.faults
        # The one that waited after that is ended with the run, before its Ray is.
        assert not workers_processes() - others
