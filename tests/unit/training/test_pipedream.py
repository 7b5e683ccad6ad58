"""Steps overlap, and every backward pass uses the weights of its forward pass."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus.errors import Interrupted, TrainingError
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.membership.view import host_shards
from raytrain_plus.parallel.pipeline.schedule import orders
from raytrain_plus.parallel.pipeline.transport import Handovers
from raytrain_plus.training.model.model import build_chunks
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.passes.pipedream import WeightVersions
from raytrain_plus.training.step.window import OverlappingSteps
from raytrain_plus.training.weights.step_options import Technique
from tests.support.overlapping import MICROBATCHES, SEED, SHARDS, Smooth, batches, chunks_of, together
from tests.support.stages import CPU
from tests.unit.parallel.pipeline import replicas


def by_hand(
    shape: Shape, windows: list[range], clip_value: float = math.inf
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Compute the same in one process, by definition: each pass by hand, with the weights of that many steps ago."""
    task = Smooth()
    modules = [build_chunks(task, SEED, CPU, [names])[0].module for names in chunks_of(shape.stages)]
    optimizers = [task.optimizer(list(module.named_parameters())) for module in modules]
    now = [{name: value.detach().clone() for name, value in module.named_parameters()} for module in modules]
    hosted = host_shards(SHARDS, shape.replicas)
    losses = []
    for window in windows:
        # For each stage, its weights after so many steps of the window.
        history = [[weights] for weights in now]
        places = [
            [(step, shard, index) for step in window for shard in hosted[replica] for index in range(MICROBATCHES)]
            for replica in range(shape.replicas)
        ]
        order = [orders("1f1b", shape.stages, len(places[replica])) for replica in range(shape.replicas)]
        todo = {
            (replica, stage): list(order[replica][stage])
            for replica in range(shape.replicas)
            for stage in range(shape.stages)
        }
        done: dict[tuple[int, int], int] = defaultdict(int)
        used: dict[tuple[int, int, int], tuple[int, torch.Tensor]] = {}
        forward: dict[tuple[int, int, int], torch.Tensor] = {}
        backward: dict[tuple[int, int, int], torch.Tensor] = {}
        sums: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        ended: dict[tuple[int, int], int] = defaultdict(int)
        totals: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        while any(todo.values()):
            before = sum(map(len, todo.values()))
            for (replica, stage), actions in todo.items():
                if not actions or done[replica, stage] >= len(history[stage]):
                    continue
                kind, number = actions[0].kind, actions[0].microbatch
                step, shard, index = places[replica][number]
                batch = batches(step, (shard,))[shard][index].batch
                weight = float(1 + batch["y"].sum())
                last = stage == shape.stages - 1
                key = (replica, stage, number)
                if kind == "F":
                    if stage and (replica, stage - 1, number) not in forward:
                        continue
                    given = forward[replica, stage - 1, number] if stage else batch["x"]
                    version = done[replica, stage]
                    used[key] = version, given
                    with torch.no_grad():
                        forward[key] = torch.func.functional_call(modules[stage], history[stage][version], (given,))
                    if last:
                        loss = F.cross_entropy(forward[key], batch["y"])
                        totals[step][0] += float(loss) * weight
                        totals[step][1] += weight
                else:
                    if not last and (replica, stage + 1, number) not in backward:
                        continue
                    version, given = used[key]
                    leaf = given.detach().clone().requires_grad_()
                    weights = {name: value.detach().requires_grad_() for name, value in history[stage][version].items()}
                    out = torch.func.functional_call(modules[stage], weights, (leaf,))
                    if last:
                        out, above = F.cross_entropy(out, batch["y"]) * weight, None
                    else:
                        above = backward[replica, stage + 1, number]
                    found = torch.autograd.grad(out, [leaf, *weights.values()], above)
                    backward[key] = found[0]
                    total = sums.setdefault((stage, step), {name: torch.zeros_like(v) for name, v in weights.items()})
                    for name, value in zip(weights, found[1:], strict=True):
                        total[name] += value
                    if number + 1 == len(places[replica]) or places[replica][number + 1][0] != step:
                        done[replica, stage] += 1
                        ended[stage, step] += 1
                        if ended[stage, step] == shape.replicas:
                            history[stage].append({})
                            for name, value in modules[stage].named_parameters():
                                value.data = history[stage][-2][name].clone()
                                value.grad = total[name] / sum(
                                    float(1 + one.batch["y"].sum())
                                    for shard in batches(step, tuple(range(SHARDS))).values()
                                    for one in shard
                                )
                                value.grad.clamp_(-clip_value, clip_value)
                            optimizers[stage].step()
                            history[stage][-1] = {
                                name: value.detach().clone() for name, value in modules[stage].named_parameters()
                            }
                actions.pop(0)
            assert sum(map(len, todo.values())) < before, "stuck"
        now = [weights[-1] for weights in history]
        losses += [totals[step][0] / totals[step][1] for step in window]
    return losses, {name: value for weights in now for name, value in weights.items()}


WINDOWS = [range(4), range(4, 5), range(5, 9)]


@pytest.mark.parametrize(
    ("shape", "clip_value"),
    [(Shape(1, 2), None), (Shape(1, 2), 0.01), (Shape(1, 4), None), (Shape(2, 2), 0.01)],
    ids=str,
)
def test_weights_and_losses_are_those_of_the_definition(shape: Shape, clip_value: float | None) -> None:
    losses, weights = by_hand(shape, WINDOWS, clip_value or math.inf)
    told = together(shape, WINDOWS, technique=Technique(clip_value=clip_value))
    for applied, own, one in told:
        assert [step.loss for step in applied] == pytest.approx(losses, rel=1e-6)
        assert one.state.last_applied == 8
        for name, value in own.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)
    # Otherwise the test would prove nothing.
    assert by_hand(shape, [range(step, step + 1) for step in range(9)])[0] != pytest.approx(losses, rel=1e-3)
    passes: Any = told[0][2].passes
    assert passes.weights.most_kept >= 1, "weights are kept where passes need them"
    assert not passes.weights._kept, "and no longer"


def test_the_loss_falls() -> None:
    applied, _, _ = together(Shape(1, 2), [range(first, first + 10) for first in range(0, 60, 10)])[0]
    first, last = applied[0].loss, applied[-1].loss
    print(f"loss {first:.3f} -> {last:.3f}")
    assert last < 0.6 * first


def test_requests_during_a_window_reach_all_stages_at_its_end() -> None:
    asked: list[int] = []

    def wished(seat: int) -> bool:
        asked.append(seat)
        # Half of the steps of the first window are made.
        return changed.is_set() and seat == 1

    changed = threading.Event()

    def act(seat: int, one: OverlappingSteps) -> None:
        if seat == 1:
            assert one.state.optimizer is not None
            one.state.optimizer.register_step_post_hook(lambda *unused: changed.set())

    for applied, _, _ in together(Shape(1, 2), [range(4)], act, wished=wished):
        assert [step.flags.pause for step in applied] == [False, False, False, True]
    assert sorted(asked) == [0, 1]


def test_a_stage_waiting_at_the_end_reports_it_and_keeps_nothing_received() -> None:
    seen: list[tuple[str, int]] = []

    def act(seat: int, one: OverlappingSteps) -> None:
        passes: Any = one.passes
        agree = passes.agree

        def looked(*arguments: Any) -> Any:
            seen.append((arguments[2].control.activity().doing, len(passes.handovers._going)))
            return agree(*arguments)

        passes.agree = looked

    most: list[int] = []
    finish_one = Handovers.finish_one

    def counted(handovers: Handovers, *arguments: Any) -> None:
        finish_one(handovers, *arguments)
        most.append(sum(kind == "backward" for kind, _, _ in handovers._going))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handovers, "finish_one", counted)
        together(Shape(1, 2), [range(6)], act)
    assert seen == [("collective", 0)] * 2
    assert max(most) <= 2, "of 36 microbatches"


class Explodes(Smooth):
    def loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        loss, weight = super().loss(model, batch).values()
        return {"loss": loss * (math.inf if float(batch["x"][0, 0]) == float(BAD) else 1.0), "weight": weight}


BAD = batches(2, (0,))[0][1].batch["x"][0, 0]


def test_an_aborted_window_leaves_no_usable_state() -> None:
    workers: list[OverlappingSteps] = []
    with pytest.raises(TrainingError, match="the loss of step 2 is not finite in shard 0"):
        together(Shape(1, 2), [range(4)], lambda seat, one: workers.append(one), Explodes)
    assert [one.state.last_applied for one in workers] == [None, None]
    assert [one.state.ready for one in workers] == [None, None]


def test_a_stage_that_completed_a_window_can_finish_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "LIMIT_S", 0.5)
    workers: list[OverlappingSteps] = []

    def act(seat: int, one: OverlappingSteps) -> None:
        workers.append(one)
        if seat == 1:
            monkeypatch.setattr(one.passes, "agree", left)

    def left(*arguments: Any) -> Any:
        raise Interrupted("the group is changing")

    with pytest.raises(Interrupted):
        together(Shape(1, 2), [range(3)], act)
    assert (workers[1].state.last_applied, workers[1].state.ready) == (None, 2)
    workers[1].state.finish({})
    assert (workers[1].state.last_applied, workers[1].state.ready) == (2, None)


def test_a_backward_pass_with_older_weights_changes_nothing_else() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    kept = WeightVersions([weight])
    kept.forward(0)
    x = torch.tensor([3.0], requires_grad=True)
    y = (weight * x).sum()
    with kept.updating(), torch.no_grad():
        weight.mul_(10)
    kept.forward(1)
    with kept.backward(0):
        y.backward()
    assert x.grad == 2.0, "not 20"
    assert weight.grad == 3.0
    assert float(weight.detach()) == 20.0
    with kept.backward(1):
        assert float(weight.detach()) == 20.0
    assert not kept._kept


@pytest.mark.parametrize("recompute", ["selective", "full", ["b"]], ids=str)
def test_layers_are_computed_again_with_the_weights_of_their_forward_pass(recompute: Any) -> None:
    plain, again = (
        together(Shape(1, 2), [range(4)], technique=Technique(recompute=one)) for one in ("none", recompute)
    )
    for (applied, weights, _), (found, others, _) in zip(plain, again, strict=True):
        assert found == applied
        assert all(torch.equal(value, weights[name]) for name, value in others.items())


@pytest.mark.parametrize(("name", "rel"), [("bf16", 0.02), ("bf16-params", 0.02)])
def test_precision_and_averages_work_with_overlapping_steps(name: Any, rel: float) -> None:
    plain = together(Shape(1, 2), [range(4)])
    found = together(Shape(1, 2), [range(4)], technique=Technique(Precision(name), decay=0.5))
    for (applied, _, _), (told, weights, one) in zip(plain, found, strict=True):
        assert [step.loss for step in told] == pytest.approx([step.loss for step in applied], rel=rel)
        averages = dict(one.state.holding().averages)
        assert averages.keys() == weights.keys()
        assert not any(torch.equal(averages[key], value) for key, value in weights.items())
        # The model holds the newest weights, rounded.
        for (_, value), copy in zip(one.state.named, one.state.parts[0].module.parameters(), strict=True):
            assert torch.equal(copy, value.to(copy.dtype))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_work_with_overlapping_steps() -> None:
    plain, compiled = (together(Shape(1, 2), [range(4)], technique=Technique(compiled=one)) for one in (False, True))
    for (applied, _, _), (told, _, _) in zip(plain, compiled, strict=True):
        assert [step.loss for step in told] == pytest.approx([step.loss for step in applied], rel=1e-5)
