"""The bytes of a training state are known before it is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Data, Ema, Job, Parallel, Workers
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.parallel.sizing import share_of
from raytrain_plus.parallel.state_bytes import StateSize
from raytrain_plus.state.hostcopy import HostMemory
from raytrain_plus.task import RunFacts, Task
from raytrain_plus.training.step.build import build_state, own_share, whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.trial.state_size import count_state
from tests.unit.training.group import context
from tests.unit.training.sharded import Layered, batches

CPU = torch.device("cpu")
WIDTH = 64


class Wide(Layered):
    """Layers so wide that rows are small beside them."""

    def layers(self) -> Any:
        return {
            "first": lambda: nn.Linear(6, WIDTH),
            "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            "second": lambda: nn.Linear(WIDTH, WIDTH),
            "again": lambda: nn.Linear(WIDTH, WIDTH),
            "last": lambda: nn.Linear(WIDTH, 3),
        }

    def tied(self) -> dict[str, str]:
        return {"again.weight": "second.weight"}


class WithSgd(Wide):
    def optimizer(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=0.1, momentum=0.9)


class WithAdafactor(Wide):
    def optimizer(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor([value for _, value in parameters])


def job(**settings: Any) -> Job:
    data = Data(path="data", batch_size=48, shards=6)
    return Job(name="x", task=Wide, data=data, steps=2, workers=Workers(min=1, max=4), seed=3, **settings)


def held(state: TrainState) -> int:
    """Return the bytes of all tensors of a state, apart from gradients."""
    values: list[torch.Tensor] = [*state.module.parameters(), *(value for _, value in state.named)]
    optimizer, averages = state.optimizer, state.holding().averages
    assert optimizer is not None
    values += [one for kept in optimizer.state.values() for one in kept.values() if one is not None and one.dim()]
    values += [value for _, value in averages]
    return sum({value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}.values())


@pytest.mark.parametrize("task", [Wide, WithSgd, WithAdafactor])
@pytest.mark.parametrize("sharded", ["none", "optimizer"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16-params"}, {"ema": Ema(decay=0.9)}, {"offload": "optimizer", "reduction": "exact"}],
    ids=lambda settings: ", ".join(settings) or "plain",
)
def test_a_state_has_as_many_bytes_as_were_counted(task: type[Task], sharded: Any, settings: dict[str, Any]) -> None:
    wished = job(parallel=Parallel(sharded=sharded), **settings)
    facts = task()
    facts.run = RunFacts(total_steps=2, batch_size=48)
    size = count_state(wished, task())
    assert size is not None
    state = build_state(wished, facts, CPU)
    own_share(wished, state)
    whole_steps(state).run(0, batches(0, range(6)), context(SoloWorld()))
    # Gradients of the rows that are changed are beside those of the model.
    copies = sum(value.nbytes for _, value in state.named) if wished.offload == "optimizer" else 0
    of_rows = 0.03 * size.needed("none", Fraction(1))
    assert abs(held(state) + copies + size.gradients + size.saved // 4 - size.of(wished, 4)) < of_rows
    if sharded == "none":
        checkpoint = HostMemory().copy(state.holding(), 0, lambda _: (0,))[0]
        assert size.saved == sum(copy.data.nbytes for copy in checkpoint if copy.data.nbytes > 8)


def test_the_parts_are_those_of_zero() -> None:
    """With Adam in float32, a parameter needs 16 bytes, and its rows what ZeRO's stages leave of them."""
    part = 4 * 10**9
    size = StateSize(
        weights=part,
        frozen=0,
        changed=part,
        masters=0,
        gradients=part,
        kept=2 * part,
        saved=3 * part,
        largest=0,
        layered=True,
    )
    assert size.needed("none", Fraction(1)) == 4 * part
    assert size.needed("optimizer", share_of(Parallel(sharded="optimizer"), 8)) == 2 * part + 2 * part // 4
    assert size.needed("full", share_of(Parallel(sharded="full", holders=1), 8)) == 4 * part // 8
    assert size.needed("full", share_of(Parallel(sharded="full"), 8)) == 4 * part // 4
    assert size.needed("full", share_of(Parallel(sharded="full"), 1)) == 4 * part
    # Weights and gradients in bfloat16; masters, moments and the masters' gradients are elsewhere.
    halves = replace(size, weights=part // 2, gradients=part, masters=part)
    assert halves.needed("none", Fraction(1), offloaded=True, apart=True) == part // 2 + part
    assert halves.needed("none", Fraction(1), offloaded=True) == part // 2 + 5 * part
    assert halves.needed("full", share_of(Parallel(sharded="full", holders=1), 8), offloaded=True, apart=True) == 0


def test_a_model_that_cannot_be_built_without_values_has_no_known_size() -> None:
    class Reads(Wide):
        def layers(self) -> Any:
            raise OSError("no file")

    assert count_state(job(), Reads()) is None
