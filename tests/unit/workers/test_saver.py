"""A worker's share is copied at once and written in the background; a failing storage delays no step."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raytrain_plus.errors import Interrupted, TrainingError
from raytrain_plus.state.holding import Holding, describe_state
from raytrain_plus.state.named import bytes_of
from raytrain_plus.state.stages import REST, whole_tree
from raytrain_plus.state.stored.checkpoint import read_tensors
from raytrain_plus.state.stored.manifest import join_shares, name_of
from raytrain_plus.storage import retry
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Buffer
from raytrain_plus.workers.messages import ShareOf, Written
from raytrain_plus.workers.states import saver as module
from raytrain_plus.workers.states.saver import Part, Saver
from tests.support.states import described
from tests.unit.workers.trained import LateCopies, holding

Told = queue.SimpleQueue[Written]


def saver(run: LocalFolder, held: Holding, told: Told, writer: int = 0, writers: int = 1) -> Saver:
    made = Saver(run, lambda: held, 4, best=True)
    holders = {REST: tuple(range(writers))}
    made.begin(Part(ShareOf(generation=2, writer=writer, writers=writers, holders=holders), told.put))
    return made


def test_when_a_checkpoint_is_due(tmp_path: Path) -> None:
    made = saver(LocalFolder(tmp_path), holding(), queue.SimpleQueue())
    assert [step for step in range(12) if made.due(step, evaluated=False)] == [3, 7, 11]
    assert made.due(0, evaluated=True)
    assert not any(Saver(LocalFolder(tmp_path), holding, None, best=False).due(step, True) for step in range(99))


@pytest.mark.parametrize("late", [False, True])
def test_the_written_state_is_the_one_at_the_copy(tmp_path: Path, late: bool) -> None:
    run, held = LocalFolder(tmp_path), holding()
    if late:
        held = replace(held, copies=LateCopies())
    before = {name: value.detach().clone() for name, value in held.parameters}
    told: Told = queue.SimpleQueue()
    writers = [saver(run, held, told, writer, 2) for writer in range(2)]
    for one in writers:
        one.copy(7, {"loss": 0.5})
    with torch.no_grad():
        for _, value in held.parameters:
            value.zero_()
    shares = sorted((told.get(timeout=10) for _ in writers), key=lambda one: one.writer)
    assert [one.error for one in shares] == ["", ""]
    assert (shares[0].tree["scales"], shares[1].tree) == ({"weight": -3}, None)
    assert shares[0].metrics == {"loss": 0.5}
    made = described(7, 2, [one.share for one in shares if one.share])
    _, tensors = join_shares([one.share for one in shares if one.share])
    assert sorted(tensors)[:2] == ["optim/bias/exp_avg", "optim/bias/exp_avg_sq"]
    read = read_tensors(run, made, {"param/weight": None})["param/weight"][2]
    assert read.tobytes() == before["weight"].numpy().tobytes()


def test_writers_that_hold_different_layers_write_the_whole_state(tmp_path: Path) -> None:
    run, held = LocalFolder(tmp_path), holding()
    told: Told = queue.SimpleQueue()
    holders = {"weight": (0,), "bias": (0, 1), REST: (1,)}
    for writer in range(2):
        made = Saver(run, lambda: held, 4, best=True)
        made.begin(Part(ShareOf(generation=2, writer=writer, writers=2, holders=holders), told.put))
        made.copy(7, {})
    written = sorted((told.get(timeout=10) for _ in range(2)), key=lambda one: one.writer)
    tensors, tree = describe_state(held)
    made_of_all = described(7, 2, [one.share for one in written if one.share])
    read = read_tensors(run, made_of_all, dict.fromkeys(made_of_all.tensors))
    assert {name: data.tobytes() for name, (_, _, data) in read.items()} == {
        name: bytes_of(value).numpy().tobytes() for name, value in tensors.items()
    }
    assert whole_tree([one.tree for one in written]) == tree
    assert [list(one.tree["optimizer"]) for one in written] == [list(tree["optimizer"]), []]


class Slow(LocalFolder):
    """Writes when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        assert self.go.wait(10)
        super().write(name, data)


def test_it_is_busy_until_its_share_is_durable(tmp_path: Path) -> None:
    run, told = Slow(tmp_path), queue.SimpleQueue[Written]()
    made = saver(run, holding(), told)
    assert not made.busy()
    made.copy(3, {})
    assert made.busy()
    run.go.set()
    assert told.get(timeout=10).error == ""
    assert made._free.wait(10)
    made.copy(7, {})
    assert told.get(timeout=10).step == 7


def test_it_is_busy_until_the_checkpoint_is_complete_or_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = queue.SimpleQueue[Written]()
    made = saver(LocalFolder(tmp_path), holding(), told)
    made.copy(3, {})
    assert told.get(timeout=10).error == ""
    assert made._free.wait(10)
    for step, generation in ((3, 1), (2, 2)):
        made.settled(step, generation)
        assert made.busy(), "that was another one"
    made.settled(3, 2)
    assert not made.busy()
    # If nobody ever reports the end, training is not left without checkpoints.
    monkeypatch.setattr(module, "STILL_S", 0.05)
    made.copy(7, {})
    assert told.get(timeout=10).error == ""
    until = time.monotonic() + 10
    while made.busy():
        assert time.monotonic() < until


def test_a_stalled_storage_is_reported_while_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STILL_S", 0.05)
    run, told = Slow(tmp_path), queue.SimpleQueue[Written]()
    made = saver(run, holding(), told)
    made.copy(3, {})
    until = time.monotonic() + 10
    while told.empty():
        assert made.busy()
        assert time.monotonic() < until
    assert told.get().error == f"{tmp_path} has accepted no data of it for 0.05 s"
    assert made.busy()
    run.go.set()
    assert told.get(timeout=10).error == ""
    assert made._free.wait(10)
    assert told.empty(), "it is reported once"
    made.copy(7, {})
    assert made.copied == 7
    assert told.get(timeout=10).step == 7
    made.begin(Part(ShareOf(generation=3, writer=0, writers=1, holders={REST: (0,)}), told.put))
    assert made.copied == -1


def test_training_waits_until_a_checkpoint_is_complete(tmp_path: Path) -> None:
    told = queue.SimpleQueue[Written]()
    made = saver(LocalFolder(tmp_path), holding(), told)
    made.wait(lambda: None)
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 2:
            made.settled(3, 2)
        if checks > 9:
            raise Interrupted("the group is changing")

    made.copy(3, {})
    assert told.get(timeout=10).weights == {"weight": True, "bias": True}
    assert made._free.wait(10)
    made.wait(check)
    assert checks == 2
    made.copy(7, {})
    with pytest.raises(Interrupted):
        made.wait(check)


class Failing(LocalFolder):
    """Fails so many times."""

    def __init__(self, path: Path, failures: int, failure: int) -> None:
        super().__init__(path)
        self.failures = failures
        self.failure = failure

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        self.failures -= 1
        if self.failures >= 0:
            # It has taken a part.
            for _, _ in zip(range(2), data, strict=False):
                continue
            raise OSError(self.failure, os.strerror(self.failure), name)
        super().write(name, data)


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("failures", [2, 9])
def test_a_failing_storage_is_retried_and_then_reported(
    tmp_path: Path, failures: int, failure: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "PAUSES_S", (0.001, 0.001))
    taken: list[int] = []
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: taken.append((made.writing() or (-1, 0))[0]))
    told: Told = queue.SimpleQueue()
    made = saver(Failing(tmp_path, failures, failure), holding(), told)
    made.copy(3, {})
    file = f"checkpoints/{name_of(3, 2)}/00000-of-00001.safetensors"
    error = "" if failures == 2 else f"[Errno {failure}] {os.strerror(failure)}: '{file}' (tried 3 times)"
    assert told.get(timeout=10).error == error
    assert made._free.wait(10)
    assert ((tmp_path / "checkpoints" / name_of(3, 2)).exists()) == (not error)
    assert taken == [0, 0], "the next attempt begins at the first byte"


@pytest.mark.parametrize("place", ["a weight", "a moment", "a buffer"])
def test_a_state_that_is_not_finite_is_not_saved_and_stops_the_training(tmp_path: Path, place: str) -> None:
    held = holding()
    mask = torch.tensor([0.0, -torch.inf])
    held = replace(held, buffers={"mask": mask, "mean": torch.zeros(2)}, allowed=frozenset({"buffer/mask"}))
    [(_, weight), *_] = held.parameters
    assert held.optimizer is not None
    told: Told = queue.SimpleQueue()
    one = saver(LocalFolder(tmp_path), held, told)
    one.copy(3, {})
    assert told.get(timeout=10).error == "", "what was not finite from the beginning may stay so"
    one.check()
    where = {
        "a weight": weight.data,
        "a moment": held.optimizer.state[weight]["exp_avg_sq"],
        "a buffer": held.buffers["mean"],
    }[place]
    where.view(-1)[1] = torch.inf
    one.copy(7, {})
    written = told.get(timeout=10)
    assert written.share is None
    assert "the state after step 7 is not finite" in written.error
    with pytest.raises(TrainingError, match="the state after step 7 is not finite"):
        one.check()
    assert [path.name for path in tmp_path.rglob("*.safetensors") if "0000000007" in str(path)] == []


def test_what_was_reported_is_kept_until_the_end_of_the_checkpoint_is_known(tmp_path: Path) -> None:
    told: Told = queue.SimpleQueue()
    made = saver(LocalFolder(tmp_path), holding(), told)
    assert made.written is None
    made.copy(3, {})
    written = told.get(timeout=10)
    assert made.written == written
    made.settled(3, 1)
    assert made.written == written
    made.settled(3, 2)
    assert made.written is None
    # Its end was known before it was written.
    made.copy(7, {})
    made.settled(7, 2)
    told.get(timeout=10)
    assert made._free.wait(10)
    assert made.written is None
