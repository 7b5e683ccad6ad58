"""What is published of large models, as the planner's formulas give it."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from raytrain_plus import Workers
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.parallel.pipeline.memory import Misfit
from raytrain_plus.planner.cost import ChoiceCost, CostModel, mfu, ring_bytes
from raytrain_plus.planner.plan_table import SizePlan
from raytrain_plus.planner.search import USABLE, plan_sizes
from raytrain_plus.planner.space import Choice, FreeSettings
from raytrain_plus.planner.transformer import Gpt, gpt_profile
from tests.unit.planner.profiles import adam, job

MT_NLG = Gpt(blocks=105, width=20_480)
"""Smith et al., "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B", 2022."""
GB = 1e9


def large(shards: int, microbatches: int, tensor: int, holders: int = 1) -> CostModel:
    asked = job(
        1536,
        shards,
        parallel={"tensor": tensor, "microbatches": microbatches, "holders": holders},
        workers=Workers(gpus=1),
        precision="bf16-params",
    )
    return CostModel(asked, gpt_profile(MT_NLG))


def test_the_model_has_530_billion_parameters() -> None:
    assert round(MT_NLG.parameters / 1e9) == 531


def test_zero_3_on_eight_workers_needs_an_eighth_exactly() -> None:
    state = adam(10**9)
    alone = state.needed("none", Fraction(1)) + 2 * state.largest
    assert 8 * (state.needed("full", Fraction(1, 8)) - 2 * state.largest) == alone - 2 * state.largest == 16 * 10**9


@pytest.mark.parametrize("members", [2, 8, 1024])
def test_a_ring_sends_nearly_twice_the_bytes_whatever_its_size(members: int) -> None:
    assert ring_bytes(1e9, members) == 2 * (members - 1) / members * 1e9


def test_124_petaflops_on_1024_a100_are_39_percent_of_the_peak() -> None:
    assert round(mfu(124e15, 1.0, 1024, 312e12), 3) == 0.388


def test_530_billion_parameters_in_8_slices_and_4_stages_need_more_than_80_gb() -> None:
    """32 replicas, ZeRO-1, a batch of 1,536: refused with the bytes at 80 GB, while 141 GB suffice."""
    model, choice = large(32, 48, 8), Choice(Shape(32, 4, 8), FreeSettings("optimizer", "full", "none", "1f1b"))
    refused = model.of(choice, USABLE * 80 * GB)
    assert isinstance(refused, Misfit)
    assert "needs 109.6 GB" in str(refused)
    found = model.of(choice, USABLE * 141 * GB)
    assert isinstance(found, ChoiceCost)
    # A 32nd of the parameters: 2 bytes of weights and 4 of gradients each, and 12 bytes over 32 replicas.
    share = MT_NLG.parameters / 32
    assert found.memory.weights + found.memory.gradients == pytest.approx(6 * share, rel=0.03)
    assert found.memory.masters + found.memory.optimizer == pytest.approx(12 * share / 32, rel=0.03)


def test_sharded_full_needs_less_but_keeps_all_microbatches() -> None:
    model = large(512, 3, 1)
    found = model.of(Choice(Shape(512), FreeSettings("full", "full", "none", "1f1b")), USABLE * 141 * GB)
    assert isinstance(found, ChoiceCost)
    # 16 bytes a parameter over 512 workers, and two layers of 6 bytes a parameter.
    rows = 16 * MT_NLG.parameters / 512
    held = found.memory.total - found.memory.activations
    assert held == pytest.approx(rows + 2 * 6 * MT_NLG.block_parameters, rel=0.01)


def test_ten_thousand_workers_and_530_billion_parameters_take_less_than_ten_seconds() -> None:
    asked = job(1536, 1536, parallel={"tensor": 8}, workers=Workers(gpus=1), precision="bf16-params")
    start = time.process_time()
    found = plan_sizes(asked, gpt_profile(MT_NLG), [10_000], lambda workers: 141 * GB).at(10_000)
    assert time.process_time() - start < 10
    assert isinstance(found, SizePlan)
    assert found.choice.shape.stages > 1
    assert found.mfu is not None
    assert 0.2 < found.mfu < 0.5
