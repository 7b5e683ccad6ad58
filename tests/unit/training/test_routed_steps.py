"""What steps say of the experts of a model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.layers import Experts
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.remarks import Remark
from raytrain_plus.training.step.step import SynchronousSteps
from tests.support import exact_steps
from tests.unit.training.group import context


class Sparse(exact_steps.Small):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def model(self) -> nn.Module:
        return nn.ModuleDict({"net": super().model(), "sparse": Experts(3, 4, 4, **self.options)})

    def buffer_rule(self, name: str) -> Any:
        return super().buffer_rule(name.removeprefix("net."))

    def loss(self, model: Any, batch: Any) -> dict[str, Any]:
        return super().loss(lambda x: model["sparse"](model["net"](x)), batch)  # type: ignore[arg-type]


def made(steps: SynchronousSteps, count: int = 3) -> list[Applied]:
    world = context(SoloWorld())
    return [steps.run(step, exact_steps.batches(step, range(exact_steps.SHARDS)), world) for step in range(count)]


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_has_the_use_of_its_experts_over_all_shards(exact: bool) -> None:
    steps = exact_steps.steps_of(Sparse(top_k=2, capacity=1.0), exact)
    used = made(steps)[-1].experts
    assert list(used) == ["sparse"]
    use, router = used["sparse"], steps.state.module.get_submodule("sparse.router")
    *load, dropped, tokens, _ = router.routed.tolist()  # type: ignore[operator, union-attr]
    assert (list(use.load), use.dropped, use.choices, use.capacity) == (load, dropped, 2 * tokens, 1.0)
    assert use.dropped > 0
    assert 0.5 * math.log(4) < use.entropy <= math.log(4)


def test_a_model_without_experts_has_none() -> None:
    assert [one.experts for one in made(exact_steps.steps_of())] == [{}] * 3


def test_a_router_that_no_token_has_reached_says_nothing() -> None:
    assert Experts(3, 4, 4).router.use_of([0.0] * 7) is None


def remarks(**options: Any) -> list[tuple[Remark, ...]]:
    steps = exact_steps.steps_of(Sparse(**options))
    steps.state.rules["left_alone"] = False
    return [tuple(one for one in step.remarks if one.key == "mostly dropped") for step in made(steps)]


def test_a_capacity_that_drops_most_tokens_is_said_once() -> None:
    found = remarks(capacity=0.1)
    assert [len(one) for one in found] == [1, 0, 0]
    text = found[0][0].text
    assert text.startswith("'sparse' drops ")
    assert (
        "more than half of the choices of experts: with capacity=0.1 an expert takes 0.1 times its even share" in text
    )
    assert "give Experts a larger capacity, such as 1.25, or None" in text
    assert remarks(capacity=2.0) == remarks() == [()] * 3
