"""Exporting the model from several holders, in pieces; losses and errors on the way are reported."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from raytrain_plus.controller.group import model_hand_over
from raytrain_plus.controller.group.model_hand_over import Exported, Exporter
from raytrain_plus.errors import Interrupted, RaytrainError, RunError, WorkerLost
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.pieces import Piece
from raytrain_plus.state.named import bytes_of, entry_of, state_sha256
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Buffer

HELD = {
    ("a", Stage(0, 2)): {"param/x": torch.randn(4), "optim/x/step": torch.tensor(2.0)},
    ("b", Stage(1, 2)): {"param/y": torch.randn(2, 3)},
}
HOLDERS = tuple(HELD)
WHOLE = {name: value for state in HELD.values() for name, value in state.items()}


class Workers:
    """Workers that answer requests; a failure set by a test comes first."""

    def __init__(self, before: Callable[[str, str], None] = lambda worker, method: None) -> None:
        self.before = before

    def begin(
        self, worker: str, method: str, step: int, stage: Stage, pieces: Sequence[Piece] = ()
    ) -> Callable[..., Any]:
        state = HELD[worker, stage]
        assert step == 7

        def wait(limit_s: float) -> Any:
            self.before(worker, method)
            if method == "inventory":
                return [entry_of(name, value) for name, value in state.items()]
            return [bytes_of(state[piece.name]).numpy() for piece in pieces]

        return wait


def exported(run: LocalFolder, workers: Workers, ours: Callable[[], None] = lambda: None) -> str | RaytrainError:
    told: queue.SimpleQueue[Exported] = queue.SimpleQueue()
    made = Exporter(run, workers.begin, ours, told.put)
    made.export(HOLDERS, 7)
    try:
        end = told.get(timeout=10)
        assert (end.leads, end.step) == (HOLDERS, 7)
        return end.outcome
    finally:
        made.close()


def test_a_model_in_stages_is_one_file(tmp_path: Path) -> None:
    assert exported(LocalFolder(tmp_path), Workers()) == state_sha256(WHOLE)
    model = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert model.keys() == {"x", "y"}
    assert torch.equal(model["y"], WHOLE["param/y"])


@pytest.mark.parametrize("method", ["inventory", "tensors"])
@pytest.mark.parametrize("failure", [WorkerLost("b died"), Interrupted("b has no copy of it any more")])
def test_a_holder_that_is_lost_leaves_no_file(tmp_path: Path, method: str, failure: Exception) -> None:
    def before(worker: str, asked: str) -> None:
        if (worker, asked) == ("b", method):
            raise failure

    assert exported(LocalFolder(tmp_path), Workers(before)) is failure
    assert not list(tmp_path.iterdir())


class Full(LocalFolder):
    """Accepts a piece or two, and then fails, so many times."""

    def __init__(self, path: Path, times: int) -> None:
        super().__init__(path)
        self.times = times

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        if self.times:
            self.times -= 1
            for _, _ in zip(range(2), data, strict=False):
                continue
            raise OSError("no space left")
        super().write(name, data)


def test_a_refused_write_is_retried_from_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_hand_over, "LAST_PAUSES_S", (0.0,))
    seen: list[int] = []
    failed = Exporter._failed

    def heard(self: Exporter, error: OSError) -> None:
        seen.append(self.written[0])
        failed(self, error)
        seen.append(self.written[0])

    monkeypatch.setattr(Exporter, "_failed", heard)
    assert exported(Full(tmp_path, 1), Workers()) == state_sha256(WHOLE)
    refused = exported(Full(tmp_path, 9), Workers())
    assert isinstance(refused, RunError)
    assert str(refused) == f"the model cannot be written to {tmp_path}: no space left (tried 2 times)"
    assert seen[0] > 0
    assert seen[1::2] == [0, 0, 0], "what is shown until the next attempt"


def test_a_run_of_another_controller_is_left_alone(tmp_path: Path) -> None:
    def ours() -> None:
        raise RunError("another controller has taken this run over")

    assert str(exported(LocalFolder(tmp_path), Workers(), ours)) == "another controller has taken this run over"
    assert not list(tmp_path.iterdir())


def test_an_internal_error_is_reported_with_its_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def before(worker: str, asked: str) -> None:
        raise KeyError("param/x")

    told = exported(LocalFolder(tmp_path), Workers(before))
    assert isinstance(told, RunError)
    assert "KeyError: 'param/x'; please report this" in str(told)
    assert caplog.records[0].exc_info


def test_a_cancelled_export_ends_and_the_next_one_begins(tmp_path: Path) -> None:
    first, go = threading.Event(), threading.Event()

    def before(worker: str, asked: str) -> None:
        if asked == "tensors" and not go.is_set():
            first.set()
            assert go.wait(10)

    told: queue.SimpleQueue[Exported] = queue.SimpleQueue()
    made = Exporter(LocalFolder(tmp_path), Workers(before).begin, lambda: None, told.put)
    made.export(HOLDERS, 7)
    assert first.wait(10)
    made.export(HOLDERS, 7)
    go.set()
    assert isinstance(told.get(timeout=10).outcome, Interrupted)
    assert told.get(timeout=10).outcome == state_sha256(WHOLE)
    made.close()
