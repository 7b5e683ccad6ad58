"""What a controller finds that takes the place of a dead one: a run, its result, or deaths without end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_plus.controller.opening import continue_run
from raytrain_plus.controller.succession import MOST_STARTS, Hopeless, Succession, take
from raytrain_plus.errors import RunError
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.result import Result
from raytrain_plus.runs import folder as module
from raytrain_plus.runs.folder import LEFT, Fence, claims_of, lease_holder
from raytrain_plus.runs.history import load_history
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.listeners import FakeListeners
from tests.unit.controller.fakes import FakeWorkers, Run, job_of, order_of

OURS, OTHER = "run/1", "run/0"


@contextlib.contextmanager
def process(pid: int) -> Iterator[None]:
    """Open while claims are those of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "os", SimpleNamespace(getpid=lambda: pid, environ={}))
        yield


def die(run: Run) -> LocalFolder:
    """Leave nothing of the run's controller but what it has written; return the run's folder."""
    engine: Any = run.engine
    engine.journal._outlets.abandon()
    engine.journal._outlets._log.close()
    engine.journal._aside._threads.shutdown(wait=True, cancel_futures=True)
    return LocalFolder(Path(run.order.plan.folder))


def trained(folder: Path) -> Run:
    """Return a run of a controller `OURS` that has made two steps."""
    run = Run(folder, job_of())
    run.begin()
    run.train("worker-0", "worker-1")
    for name in ("worker-0", "worker-1"):
        run.report(name, 0, 1)
    return run


def taken(run: LocalFolder, controller: str = OURS) -> Any:
    """Return what this controller finds, and the order that it goes on with."""
    assert run.path is not None
    return take(run, order_of(job_of(), run.path), FakeWorkers(), controller, 1, lambda: 0.0)


def test_a_run_that_this_controller_has_ended_has_a_result(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    result = run.engine._ending.fail("a reason")
    _, left = taken(die(run))
    assert left == result


def test_the_result_and_the_requests_of_an_earlier_start_do_not_count(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    run.engine.journal.tell("requested", what="stop")
    run.engine._ending.fail("a reason")
    folder = die(run)
    assert [one["what"] for one in load_history(folder).requested] == ["stop"]
    # Another controller resumes the run, and dies before it begins.
    with process(1):
        Fence(folder, claims_of(folder), "run/2")
    order, left = taken(folder, "run/2")
    assert left is None
    assert (order.past.requested, order.past.committed) == ((), 1)


def deaths(folder: LocalFolder, *pids: int, controller: str = OURS) -> None:
    """Have processes claim the run, and die."""
    for pid in pids:
        with process(pid):
            Fence(folder, claims_of(folder), controller)


def test_controllers_that_die_before_they_have_taken_over_are_counted(tmp_path: Path) -> None:
    folder = die(trained(tmp_path / "run"))
    assert load_history(folder).claimed == 1
    # Those of others do not count, and each process counts once.
    deaths(folder, 101, 102, controller=OTHER)
    deaths(folder, *range(1, MOST_STARTS), 1, 2, 3)
    order, left = taken(folder)
    assert left is None
    deaths(folder, 1000)
    order, left = taken(folder)
    assert isinstance(left, Hopeless)
    assert f"the controller died {MOST_STARTS} times in a row" in str(left.error)
    assert order.past.committed == 1


def test_a_controller_that_has_taken_over_begins_the_count_again(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    folder = die(run)
    deaths(folder, *range(1, MOST_STARTS))
    order, left = taken(folder)
    assert left is None
    again = Run(tmp_path / "run", job_of(), order.past)
    again.begin()
    again.train("worker-0", "worker-1")
    again.report("worker-0", 0)
    again.report("worker-1", 0)
    folder = die(again)
    assert load_history(folder).claimed == claims_of(folder)
    deaths(folder, *range(1, MOST_STARTS))
    assert taken(folder)[1] is None


def ends_with(folder: LocalFolder, why: str) -> Result:
    """Check that the run has ended with this error; return its result."""
    result = Result.load(folder)
    assert result is not None
    assert (result.status, result.error, result.steps) == ("failed", why, 2)
    last = list(read_events(folder))[-1]
    assert (last["kind"], last["status"], last["error"], last["steps"]) == ("run_finished", "failed", why, 2)
    assert lease_holder(folder) is None
    return result


def test_a_run_that_is_given_up_says_so_in_its_folder(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    folder = die(run)
    order = order_of(job_of(), tmp_path / "run", load_history(folder))
    engine = run.engine_of(order)
    error = RunError("it died too often")
    closing = engine.give_up(Hopeless(Fence(folder, claims_of(folder), OURS), error))
    assert (closing.result, closing.error) == (ends_with(folder, "it died too often"), error)
    assert not list(run.workers)


def test_what_workers_have_left_is_not_for_a_controller_that_adopts_others(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    charter = run.assignment("worker-0").charter
    folder = die(run)
    folder.write(f"{LEFT}/worker-0.json", [b"{}"])
    engine: Any = run.engine_of(order_of(job_of(), tmp_path / "run", load_history(folder)))
    left = Succession(Fence(folder, claims_of(folder), OURS), charter, {}, 0.0, 0.0)
    continue_run(left, engine._adoption._run, lambda *_: FakeListeners())
    engine.journal.close()
    assert not folder.files(LEFT)


def test_an_adoption_that_fails_leaves_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path / "run")
    charter = run.assignment("worker-0").charter
    folder = die(run)
    order = order_of(job_of(), tmp_path / "run", load_history(folder))
    engine: Any = run.engine_of(order)

    def failing(left: Succession) -> None:
        raise RunError("a step is lost")

    monkeypatch.setattr(engine._adoption, "adopt", failing)
    fence = Fence(folder, claims_of(folder), OURS)
    with pytest.raises(RunError, match="a step is lost"):
        engine.run(Succession(fence, charter, {}, 0.0, 0.0))
    ends_with(folder, "a step is lost")


def test_a_controller_that_was_stopped_looks_for_another_one_before_it_tells_anything(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    folder = LocalFolder(tmp_path / "run")
    told = len(list(read_events(folder)))
    Fence(folder, claims_of(folder), OTHER)
    run.time.now += 60
    with pytest.raises(RunError, match="another controller has taken this run over"):
        # The other one has applied it, too.
        run.report("worker-0", 2, 3)
    assert len(list(read_events(folder))) == told
    die(run)
