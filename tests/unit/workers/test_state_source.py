"""A state is given to others as it is after the requested step, or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from raytrain_plus.errors import Interrupted, RunError, TrainingError
from raytrain_plus.membership.pieces import Piece
from raytrain_plus.state.stages import REST, layer_of
from raytrain_plus.state.stored.digest import model_file
from raytrain_plus.state.transfer import snapshot_digest
from raytrain_plus.workers.messages import WHOLE, Sent
from raytrain_plus.workers.preparation.prepared import Prepared
from tests.support.exact_steps import Small, state_of
from tests.unit.workers.members import SECOND, in_background, member

STAGE = WHOLE.stage


def copied(prepared: Prepared, step: int) -> None:
    """Copy the state after `step` in memory, as a member of a generation does."""
    told: list[Sent] = []
    prepared.copier.begin(0, STAGE, True, None, told.append)
    prepared.copier.copy(step, lambda: None)
    while not told:
        assert prepared.copier.ready() is False


def test_a_state_that_is_not_finite_is_not_exported(tmp_path: Path) -> None:
    prepared = member(tmp_path)
    with torch.no_grad():
        dict(prepared.own.state.named)["first.weight"].view(-1)[0] = torch.nan
    with pytest.raises(TrainingError, match=r"the state after step -1 is not finite: 'param/first\.weight' holds NaN"):
        prepared.source.inventory(-1, STAGE)


def test_what_is_neither_held_nor_copied_is_not_given(tmp_path: Path) -> None:
    source = member(tmp_path).source
    assert source.has(-1, STAGE)
    assert not source.has(0, STAGE)
    assert not source.has(-1, SECOND)
    with pytest.raises(RunError, match=r"worker-0 has neither .* of step -1 nor a copy of it"):
        source.snapshot(0, -1, SECOND)
    with pytest.raises(Interrupted, match="nor a copy of it"):
        source.inventory(0, STAGE)
    with pytest.raises(Interrupted, match="no longer has a copy"):
        source.tensors(0, STAGE, [Piece("param/first.weight")])


def test_a_copy_is_given_like_the_state_itself_once_the_worker_has_gone_on(tmp_path: Path) -> None:
    prepared = member(tmp_path)
    one, source = prepared.own.state, prepared.source
    entries, given = source.inventory(-1, STAGE), source.snapshot(3, -1, STAGE)
    pieces = [Piece(entry.name, 0, entry.rows) for entry in entries]
    bytes_before = [bytes(data) for data in source.tensors(-1, STAGE, pieces)]
    copied(prepared, -1)
    with torch.no_grad():
        for _, value in one.named:
            value.add_(1)
    one.last_applied = 0
    assert source.has(-1, STAGE)
    again = source.snapshot(3, -1, STAGE)
    assert given.digest == again.digest == snapshot_digest(-1, again.tensors, again.values)
    assert source.inventory(-1, STAGE) == entries
    assert [bytes(data) for data in source.tensors(-1, STAGE, pieces)] == bytes_before
    assert one.snapshot().digest != given.digest


class Tied(Small):
    """A model in which two modules are one, as an output layer is its embedding."""

    def layers(self) -> None:
        return None

    def model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
                self.last.weight = self.first.weight

        return Model()


def test_the_file_of_a_model_has_every_name_of_a_tied_weight(tmp_path: Path) -> None:
    """It is so whether the state itself is given or a copy of it."""
    prepared = member(tmp_path, build=lambda layers: state_of(Tied()))
    one, source = prepared.own.state, prepared.source
    copied(prepared, -1)
    weights = {name: value.clone() for name, value in one.module.state_dict().items()}
    for applied in (-1, 0):
        one.last_applied = applied
        inventory = source.inventory(-1, STAGE)
        file = model_file([inventory], lambda _, pieces: lambda: source.tensors(-1, STAGE, pieces), hashlib.sha256())
        found = safetensors.torch.load(b"".join(bytes(piece) for piece in file))
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        one.module.load_state_dict(found, strict=True)


def test_some_layers_of_a_state_or_of_a_copy_are_given(tmp_path: Path) -> None:
    prepared = member(tmp_path)
    one, source = prepared.own.state, prepared.source
    layers = ("first", REST)
    given = source.snapshot(3, -1, STAGE, layers)
    assert {layer_of(name) for name in given.tensors} == {"first"}
    assert given.digest == snapshot_digest(-1, given.tensors, given.values)
    copied(prepared, -1)
    one.last_applied = 0
    again = source.snapshot(3, -1, STAGE, layers)
    assert (again.digest, again.values) == (given.digest, given.values)


def test_a_worker_that_must_discard_its_state_waits_until_others_have_copied_it(tmp_path: Path) -> None:
    source = member(tmp_path).source
    checks: list[None] = []
    waiting = in_background(lambda: source.wait_until_given(4, 2, lambda: checks.append(None)))
    source.snapshot(3, -1, STAGE)
    source.snapshot(4, -1, STAGE)
    before = len(checks)
    while len(checks) < before + 2:
        assert waiting.is_alive(), "only one was given for this generation"
    source.snapshot(4, -1, STAGE)
    waiting.join(10)
    assert not waiting.is_alive()
    source.forget_given()
    with pytest.raises(Interrupted):
        source.wait_until_given(4, 1, interrupted)


def interrupted() -> None:
    raise Interrupted("the group is changing")
