"""The averages of the weights are those of torch, belong to the state, and are what is evaluated and exported."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.job.setting_types import Precision as Name
from raytrain_plus.membership.pieces import Piece
from raytrain_plus.state.named import bytes_of, entry_of
from raytrain_plus.state.stored.digest import model_file
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.workers.states.state_source import _hashed_tensors, sha256_of
from tests.support import precisions
from tests.support.precisions import SHARDS, Classifier, batches
from tests.unit.training.group import context

DECAY = 0.7


def steps_of(decay: float | None = DECAY, name: Name = "fp32") -> SynchronousSteps:
    return precisions.steps_of(name, Classifier(), decay=decay)


def averages(one: SynchronousSteps) -> dict[str, torch.Tensor]:
    return dict(one.state.holding().averages)


@pytest.mark.parametrize("name", ["fp32", "bf16-params"])
def test_averages_are_those_of_torch(name: Name) -> None:
    one, other = steps_of(name=name), steps_of(None, name)
    expected: Any = None
    for step in range(5):
        assert one.run(step, batches(step), context(SoloWorld())) == other.run(
            step, batches(step), context(SoloWorld())
        )
        masters = torch.nn.ParameterList([value for _, value in other.state.named])
        if expected is None:
            expected = AveragedModel(masters, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        expected.update_parameters(masters)
    assert list(averages(one)) == [key for key, _ in other.state.named]
    for found, wanted in zip(averages(one).values(), expected.module.parameters(), strict=True):
        assert found.dtype == torch.float32
        assert torch.allclose(found, wanted, atol=1e-6)
    assert not torch.equal(averages(one)["0.weight"], dict(one.state.named)["0.weight"])


def test_they_belong_to_the_state() -> None:
    one, other, without = steps_of(), steps_of(), steps_of(None)
    for step in range(3):
        one.run(step, batches(step), context(SoloWorld()))
        without.run(step, batches(step), context(SoloWorld()))
    other.state.adopt(one.state.snapshot())
    assert sha256_of(other.state) == sha256_of(one.state) != sha256_of(without.state)
    assert all(map(torch.equal, averages(one).values(), averages(other).values()))
    for made in (one, other):
        made.run(3, batches(3), context(SoloWorld()))
    assert sha256_of(other.state) == sha256_of(one.state)
    # A state without them is another job's.
    with pytest.raises(Exception, match="the task built another model"):
        other.state.adopt(without.state.snapshot())


def test_evaluation_uses_them_and_leaves_the_weights() -> None:
    one, without = steps_of(), steps_of(None)
    for step in range(3):
        one.run(step, batches(step), context(SoloWorld()))
    before = [value for _, value in one.state.named], sha256_of(one.state)

    def metrics(made: SynchronousSteps) -> dict[str, float]:
        return evaluate(
            made.state,
            made.passes,
            lambda shard: batches(0)[shard],
            range(SHARDS),
            context(SoloWorld()),
            shards=SHARDS,
            step=0,
        )

    found = metrics(one)
    assert sha256_of(one.state) == before[1]
    assert all(mine is there for mine, there in zip(one.state.module.parameters(), before[0], strict=True))
    with torch.no_grad():
        for name, value in without.state.named:
            value.copy_(averages(one)[name])
    assert found == metrics(without)


def test_a_file_of_the_model_holds_them_in_place_of_the_weights() -> None:
    one = steps_of()
    for step in range(3):
        one.run(step, batches(step), context(SoloWorld()))
    state = _hashed_tensors(one.state)
    digest = hashlib.sha256()

    def begin(_: int, pieces: tuple[Piece, ...]) -> Any:
        return lambda: [bytes_of(state[piece.name]).numpy() for piece in pieces]

    pieces = model_file([[entry_of(name, value) for name, value in state.items()]], begin, digest)
    written = safetensors.torch.load(b"".join(bytes(piece) for piece in pieces))
    assert written.keys() == averages(one).keys()
    assert all(torch.equal(written[name], value) for name, value in averages(one).items())
    assert digest.hexdigest() == sha256_of(one.state)
