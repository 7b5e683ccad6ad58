"""Each technique under the schedules gpipe and interleaved: the bits of one worker, with exact sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._dynamo.utils
from torch import nn

from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.torch_compat import compiled_graphs
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.weights.step_options import Technique
from tests.support.stages import Deep, alone, collected, one_computes_at_a_time, together

__all__ = ["one_computes_at_a_time"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "interleaved")
TECHNIQUES = {
    "bf16": Technique(Precision("bf16")),
    "fp16": Technique(Precision("fp16")),
    "bf16-params": Technique(Precision("bf16-params")),
    "recompute full": Technique(recompute="full"),
    "recompute selective": Technique(recompute="selective"),
    "clamped": Technique(clip_value=0.02),
    "ema": Technique(decay=0.9),
    "offloaded": Technique(Precision("bf16-params"), decay=0.9, offloads=True),
}
STAGES = Shape(1, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", TECHNIQUES)
def test_stages_have_the_bits_of_one_worker(name: str, schedule: Schedule) -> None:
    technique = TECHNIQUES[name]
    # Layers that are computed again change no bit, so one worker computes each of them once; nor does the optimizer's
    # place.
    applied, state = alone(exact=True, technique=replace(technique, recompute="none", offloads=False))
    assert any(key.startswith("ema/") for key in state) == (technique.decay is not None)
    told = together(STAGES, schedule, exact=True, technique=technique)
    assert [found for found, _ in told] == [applied] * STAGES.size
    whole = collected(told, STAGES, 0)
    assert whole.keys() == state.keys()
    assert [key for key, value in state.items() if not torch.equal(value, whole[key])] == []


class Steady(Deep):
    """Layers without dropout, for which compiled code draws other numbers."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {
            "in": lambda: nn.Linear(6, 8),
            "norm": lambda: nn.LayerNorm(8),
            "middle": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            "out": lambda: nn.Linear(8, 3),
        }


@pytest.mark.slow
@pytest.mark.timeout(300)
# torch's compiler does what torch itself warns of.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compiled_stages_have_nearly_the_losses_of_eager_layers(schedule: Schedule) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    technique = Technique(compiled=True)
    eager, _ = alone(exact=True, task=Steady)
    applied, state = alone(exact=True, task=Steady, technique=technique)
    assert compiled_graphs() > 0
    assert [one.loss for one in applied] == pytest.approx([one.loss for one in eager], rel=1e-5)
    told = together(STAGES, schedule, exact=True, task=Steady, technique=technique)
    assert [found for found, _ in told] == [applied] * STAGES.size
    whole = collected(told, STAGES, 0)
    assert [key for key, value in state.items() if not torch.equal(value, whole[key])] == []
