"""A standby on a real node becomes the worker that replaces a killed one, and does not outlive the run."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest

from raytrain_plus import Elastic, Workers
from raytrain_plus.audit.audit import audit
from tests.integration.elastic import Run, born, job, raylets
from tests.integration.tasks import write_data

pytestmark = pytest.mark.timeout(120)


def workers_processes() -> set[int]:
    """Return the processes of workers and standbys that this test has started, by way of its raylets."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ray::WorkerActor" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


def rests(pid: int) -> bool:
    """Return whether a process computes almost nothing for half a second."""
    times = [psutil.Process(pid).cpu_times()]
    time.sleep(0.5)
    times.append(psutil.Process(pid).cpu_times())
    return times[0].user > 1 and times[1].user - times[0].user <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("cpus", [1, 2])
def test_a_standby_replaces_a_killed_worker(tmp_path: Path, cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # With it, Ray would not set the number of threads.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_data(tmp_path / "data")
    with raylets(1, cpus=2 * cpus):
        workers = Workers(min=1, max=2, cpus=cpus)
        run = Run(job(tmp_path, task="tasks:Threads", steps=250, args={"pad_s": 0.02}, workers=workers))
        before = born(run.until_size(2))
        [standby] = run.until(lambda: workers_processes() - set(before), "a standby")
        run.until(lambda: rests(standby), "the end of its imports")
        run.kill(victim := run.members()[1])
        view = run.until(lambda: [e for e in run.events("view_formed")[1:] if len(e["members"]) == 2], "two members")[0]
        [kept, new] = view["members"]
        assert (kept["pid"] in before, new["pid"]) == (True, standby)
        assert new["worker"] not in (victim["worker"], kept["worker"])
        result = run.finish()
        assert result.recoveries == 1
        threads = [event["metrics"] for event in run.events("step_committed")]
        assert threads == [{"loaded": cpus, "now": cpus}] * 250
        found = audit(result.path)
        assert found.clean, found.faults
        # The one that waited after that is ended with the run, before its Ray is.
        assert not workers_processes()


@pytest.mark.slow
def test_a_standby_that_is_stopped_keeps_no_worker_from_being_replaced(tmp_path: Path) -> None:
    """It had taken the dead worker's place, and the run waited for it until `elastic.wait_s` had passed."""
    write_data(tmp_path / "data")
    with raylets(1, cpus=2):
        # The run cannot go on with one worker, and waits so long for another that the test would end first.
        elastic = Elastic(wait_s=3600.0)
        run = Run(job(tmp_path, steps=400, args={"pad_s": 0.02}, workers=Workers(min=2, max=2), elastic=elastic))
        before = born(run.until_size(2))
        [standby] = run.until(lambda: workers_processes() - set(before), "a standby")
        run.until(lambda: rests(standby), "the end of its imports")
        psutil.Process(standby).suspend()
        run.kill(run.members()[1])
        view = run.until(lambda: [e for e in run.events("view_formed")[1:] if len(e["members"]) == 2], "two members")[0]
        [kept, new] = view["members"]
        assert (kept["pid"] in before, new["pid"] in {standby, *before}) == (True, False)
        result = run.finish()
        assert (result.recoveries, len(run.events("worker_lost"))) == (1, 1)
        found = audit(result.path)
        assert found.clean, found.faults
        assert not workers_processes()
