"""A run whose workers ended without a controller: the next one completes its record, and resumes from their state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from raytrain_plus.controller import completing as module
from raytrain_plus.controller.completing import completed, shares_of, usable
from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.errors import FolderGone, RunError, StorageError
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.runs.folder import LEFT, claims_of, lease_holder
from raytrain_plus.runs.history import Past, load_history
from raytrain_plus.state.stored.manifest import FOLDER, name_of
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.training.exchange.step_records import Evaluated
from raytrain_plus.workers.messages import Written
from raytrain_plus.workers.states.leftover import LastGeneration, Leftover, leave, leftovers
from tests.support.states import shares, state
from tests.unit.controller.fakes import FakeHost, job_of, location_of, order_of
from tests.unit.controller.scripted_run import LIMITS, NAMES, ScriptedRun, entries, killed_at, step, steps_told

LAST = 4
"""The step after which the workers have stopped."""
TREE: dict[str, Any] = {"optimizer": {}, "groups": [], "scheduler": {}, "scales": {}, "persistent": []}


class Ended(NamedTuple):
    """A run whose controller and workers are gone."""

    run: LocalFolder
    workers: ScriptedRun

    def left(self, name: str, written: Written | None) -> Leftover:
        assert self.workers.charter is not None
        return Leftover(
            location=location_of(name),
            last=LastGeneration.of(self.workers.charter),
            records=self.workers.kept[name],
            written=written,
        )

    def leave(self, *names: str, writers: int = 2) -> None:
        """Have these workers leave what they have, each with its share of the last state."""
        found = written_in(self.run, writers)
        for name, written in zip(NAMES, found, strict=False):
            if name in names:
                leave(self.run, self.left(name, written))

    @property
    def order(self) -> RunOrder:
        assert self.run.path is not None
        return order_of(job_of(), self.run.path, load_history(self.run))

    def complete(self) -> Past:
        """Complete the record; return its history then."""
        order = completed(self.order, LIMITS, FakeHost(), lambda: 2000.0)
        assert order.past is not None
        assert order.past == load_history(self.run)
        return order.past


def written_in(run: LocalFolder, writers: int) -> list[Written]:
    return [
        Written(
            step=LAST,
            generation=0,
            writer=writer,
            writers=writers,
            share=share,
            tree=TREE if writer == 0 else None,
            metrics={},
            time=1000.0,
            stall_s=0.1,
            error="",
        )
        for writer, share in enumerate(shares(run, state(LAST), name_of(LAST, 0), writers))
    ]


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[Ended]:
    """A run of five steps, of which the record has three, and an evaluation of the last state."""
    run = LocalFolder(tmp_path / "run")
    with killed_at():
        workers = ScriptedRun(run)
        workers.open()
        workers.join(0)
        workers.formed()
        for number in range(3):
            for name in NAMES:
                workers.make(name, step(number, 1000.0 + number))
        workers.flush()
        workers.die()
        for name in NAMES:
            told = [step(3, 1003.0), step(LAST, 1004.0), *([Evaluated(step=LAST, metrics={"loss": 0.5})])]
            workers.kept[name] += [(0, one) for one in told]
        yield Ended(run, workers)


def check_steps(ended: Ended, to: int) -> None:
    """Check that events and ledger have each step up to `to` once."""
    assert steps_told(ended.run, ()) == list(range(to + 1))
    assert [number for _, number in entries(ended.run, ())] == list(range(to + 1))


def test_nothing_is_lost_of_what_all_workers_have_left(ended: Ended) -> None:
    ended.leave(*NAMES)
    past = ended.complete()
    check_steps(ended, LAST)
    assert past.metrics == {LAST: {"loss": 0.5}}
    [found] = [one.manifest for one in past.found if one.manifest is not None]
    assert (found.step, found.metrics, found.layout[1]["worker"]) == (LAST, {"loss": 0.5}, "worker-1")
    told = list(read_events(ended.run))
    # This controller belongs to the next start of the run: were it to die now, it must not take this one for its own.
    assert [event["claim"] for event in told if event["kind"] == "controller_started"] == [1]
    assert [event["step"] for event in told if event["kind"] == "checkpoint_saved"] == [LAST]
    # The next controller finds nothing of it, and a free folder.
    assert not ended.run.files(LEFT)
    assert lease_holder(ended.run) is None
    assert past.claims == 2


def test_the_last_state_is_kept_of_workers_that_were_saving_it(ended: Ended) -> None:
    ended.workers.adopt()
    # As `Checkpoints.keep` does, while its writers are in no generation.
    ended.workers.record.numbers.begin(0)
    ended.workers.record.saving(LAST, 0, 0, None)
    ended.workers.flush()
    ended.workers.die()
    ended.leave(*NAMES)
    past = ended.complete()
    assert past.generation == 1
    check_steps(ended, LAST)
    assert [one.step for one in past.found if one.manifest is not None] == [LAST]


def test_a_controller_that_dies_while_it_completes_the_record_leaves_that_to_the_next(ended: Ended) -> None:
    ended.leave(*NAMES)
    saved = {name: ended.run.read(name) for name in ended.run.files(LEFT)}
    ended.complete()
    # As if it had died before the last of it.
    for name, content in saved.items():
        ended.run.write(name, [content])
    past = ended.complete()
    check_steps(ended, LAST)
    assert [one.step for one in past.found if one.manifest is not None] == [LAST]
    assert len([event for event in read_events(ended.run) if event["kind"] == "evaluated"]) == 1


def test_without_all_shares_the_record_is_completed_as_far_as_it_is_certain(
    ended: Ended, caplog: pytest.LogCaptureFixture
) -> None:
    ended.leave(NAMES[0])
    past = ended.complete()
    # Whether the other one has applied the last step is not known.
    check_steps(ended, LAST - 1)
    assert not [one for one in past.found if one.manifest is not None]
    assert "the last state is not complete" in caplog.text
    assert not ended.run.files(LEFT)


def test_a_share_that_is_gone_is_no_checkpoint(ended: Ended, caplog: pytest.LogCaptureFixture) -> None:
    ended.leave(*NAMES)
    ended.run.remove(f"{FOLDER}/{name_of(LAST, 0)}/00001-of-00002.safetensors")
    past = ended.complete()
    check_steps(ended, LAST)
    assert not [one for one in past.found if one.manifest is not None]
    assert "00001-of-00002.safetensors is missing" in caplog.text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tree": {**TREE, "optimizer": {"w": {"step": float("inf")}}}}, "ValueError"),
        ({"tree": None}, "IndexError"),
    ],
)
def test_a_state_that_is_none_keeps_no_run_from_its_checkpoints(
    ended: Ended, caplog: pytest.LogCaptureFixture, change: dict[str, Any], why: str
) -> None:
    ended.leave(*NAMES)
    left = leftovers(ended.run)
    assert left[NAMES[0]].written is not None
    bad = replace(left[NAMES[0]], written=replace(left[NAMES[0]].written, **change))
    leave(ended.run, bad)
    past = ended.complete()
    check_steps(ended, LAST)
    assert not [one for one in past.found if one.manifest is not None]
    assert "the last state cannot be used, so the run resumes from its newest checkpoint" in caplog.text
    assert why in caplog.text
    assert not ended.run.files(LEFT)


@pytest.mark.parametrize("error", [StorageError("it is full"), FolderGone("it belongs to another run")])
def test_a_storage_that_fails_removes_nothing(ended: Ended, monkeypatch: pytest.MonkeyPatch, error: RunError) -> None:
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "commit", failing)
    ended.leave(*NAMES)
    with pytest.raises(RunError):
        ended.complete()
    assert len(ended.run.files(LEFT)) == 2


def test_records_that_do_not_follow_the_runs_record_change_nothing(
    ended: Ended, caplog: pytest.LogCaptureFixture
) -> None:
    for name in NAMES:
        left = ended.left(name, None)
        # A step that must be committed, since the generation began after it, is missing.
        leave(ended.run, replace(left, records=left.records[-1:], last=replace(left.last, first_step=LAST)))
    before = len(list(read_events(ended.run)))
    past = ended.complete()
    assert (past.committed, len(list(read_events(ended.run)))) == (2, before)
    assert "step 4 is committed" in caplog.text
    assert not ended.run.files(LEFT)


def test_what_workers_of_an_older_generation_have_left_is_removed(ended: Ended) -> None:
    ended.leave(*NAMES)
    ended.workers.adopt()
    ended.workers.join(5)
    ended.workers.formed()
    ended.workers.flush()
    ended.workers.die()
    before = len(list(read_events(ended.run)))
    ended.complete()
    assert len(list(read_events(ended.run))) == before
    assert not ended.run.files(LEFT)


def test_a_run_without_leftovers_is_not_claimed(ended: Ended) -> None:
    order, claims = ended.order, claims_of(ended.run)
    assert completed(order, LIMITS, FakeHost(), lambda: 0.0) is order
    new = replace(order, past=None)
    ended.leave(*NAMES)
    assert completed(new, LIMITS, FakeHost(), lambda: 0.0) is new
    fresh = replace(order, fresh=True)
    assert completed(fresh, LIMITS, FakeHost(), lambda: 0.0) is fresh
    assert claims_of(ended.run) == claims
    assert len(leftovers(ended.run)) == 2


def test_only_the_newest_generation_counts_and_only_if_an_event_names_it(ended: Ended) -> None:
    one, other = (ended.left(name, None) for name in NAMES)
    older = replace(other, last=replace(other.last, number=1))
    newer = replace(one, last=replace(one.last, number=2))
    left: dict[str, Any] = {"worker-0": newer, "worker-1": older}
    assert usable(left, Past(generation=2, formed=2)) == {"worker-0": newer}
    assert usable(left, Past(generation=2, formed=1)) == {}
    assert usable(left, Past(generation=3, formed=3)) == {}
    assert usable(left, Past(generation=3, formed=2)) == {"worker-0": newer}
    assert usable(left, Past(generation=3, formed=2, resumptions=((3, 1),))) == {}
    assert usable(left, Past(generation=2, formed=2, resumptions=((2, 1),))) == {"worker-0": newer}
    assert usable({}, Past()) == {}


def test_shares_of_different_steps_are_no_state(ended: Ended) -> None:
    first, second = written_in(ended.run, 2)
    left = {name: ended.left(name, one) for name, one in zip(NAMES, (second, first), strict=True)}
    assert shares_of(left) == [first, second]
    for other in (replace(first, step=3), replace(first, generation=1), None, replace(first, writer=1)):
        assert shares_of({**left, NAMES[1]: ended.left(NAMES[1], other)}) == []
    assert shares_of({}) == []
