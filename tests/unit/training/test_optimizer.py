"""What a task's optimizer may be, and of which parameters: refused by name, however the model is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Parallel, Workers
from raytrain_plus.errors import TaskError
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import build_state, divided_layers, own_share
from raytrain_plus.trial.state_size import count_state
from tests.support.optimizers import CPU, Plain, job, trial


class Habit(Plain):
    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return self.net.configure_optimizers()


class ByType(Plain):
    def optimizer(self, parameters: Any, model: nn.Module) -> torch.optim.Optimizer:  # type: ignore[override]
        norms = {f"{name}.{own}" for name, one in model.named_modules() if isinstance(one, nn.LayerNorm)
                 for own, _ in one.named_parameters()}  # fmt: skip
        pairs = list(parameters)
        assert norms == {"norm.weight", "norm.bias"}
        return torch.optim.AdamW(
            [
                {"params": [value for name, value in pairs if name in norms], "weight_decay": 0.0},
                {"params": [value for name, value in pairs if name not in norms]},
            ]
        )


SHARDED = {"parallel": Parallel(sharded="optimizer")}
WAYS: list[dict[str, Any]] = [{}, SHARDED, {"precision": "bf16-params"}, {"reduction": "exact"}]


def test_a_model_that_makes_its_own_optimizer_trains_where_it_has_the_parameters(tmp_path: Path) -> None:
    assert trial(tmp_path, Habit).rows == 4
    state = build_state(job(tmp_path, Habit), Habit(), CPU)
    assert state.optimizer is not None
    assert len(state.optimizer.param_groups[0]["params"]) == 6


@pytest.mark.parametrize(
    ("way", "others"),
    [
        (SHARDED, "'first.weight', 'first.bias', 'norm.weight' and 3 more"),
        # Weights of one dimension keep their precision.
        ({"precision": "bf16-params"}, "'first.weight', 'last.weight'"),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused_by_name(tmp_path: Path, way: dict[str, Any], others: str) -> None:
    with pytest.raises(TaskError) as caught:
        trial(tmp_path, Habit, **way)
    assert caught.value.what == f"the optimizer has parameters that optimizer() was not given: {others}"
    assert "define optimizer(self, parameters, model)" in caught.value.remedy


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_may_ask_for_the_model(tmp_path: Path, way: dict[str, Any]) -> None:
    assert trial(tmp_path, ByType, **way).rows == 4
    wanted = job(tmp_path, ByType, **way)
    state = build_state(wanted, ByType(), CPU)
    own_share(wanted, state)
    assert state.optimizer is not None
    assert [group["weight_decay"] for group in state.optimizer.param_groups] == [0.0, 0.01]


class OfLayers(Plain):
    """Looks for the parameters of its modules by their names."""

    def layers(self) -> Any:
        return {"first": lambda: nn.Linear(4, 8), "norm": lambda: nn.LayerNorm(8), "last": lambda: nn.Linear(8, 1)}

    def optimizer(self, parameters: Any, model: nn.Module) -> torch.optim.Optimizer:  # type: ignore[override]
        pairs = dict(parameters)
        linear = [f"{name}.weight" for name, one in model.named_modules() if isinstance(one, nn.Linear)]
        decayed = [pairs.pop(name) for name in linear]
        groups = [{"params": decayed}, {"params": list(pairs.values()), "weight_decay": 0.0}]
        return torch.optim.AdamW(groups)


@pytest.mark.parametrize("chunks", [(), (("first", "norm"), ("last",)), (("last",),)])
@pytest.mark.parametrize("way", [{}, SHARDED])
def test_a_worker_of_some_layers_gives_their_sequence_with_the_names_of_the_model(
    tmp_path: Path, chunks: Any, way: dict[str, Any]
) -> None:
    state = build_state(job(tmp_path, OfLayers, **way), OfLayers(), CPU, chunks)
    assert state.optimizer is not None
    linear = [name for name, value in state.trained.weights if value.dim() == 2]
    assert len(state.optimizer.param_groups[0]["params"]) == len(linear) > 0


def test_a_sharded_model_in_stages_may_ask_for_it_too(tmp_path: Path) -> None:
    parallel = Parallel(pipeline=2, sharded="optimizer", schedule="gpipe", holders=1)
    wanted = job(tmp_path, OfLayers, parallel=parallel, workers=Workers(min=4))
    named, _ = divided_layers(wanted, OfLayers(), CPU)
    assert len(named) == 6
    size = count_state(wanted, OfLayers())
    assert size is not None
    assert size.kept == 2 * size.weights


def test_a_model_that_no_worker_has_whole_is_not_given(tmp_path: Path) -> None:
    class Layered(ByType):
        def model(self) -> nn.Module:
            raise AssertionError

        def layers(self) -> Any:
            return {"first": lambda: nn.Linear(4, 8), "norm": lambda: nn.LayerNorm(8), "last": lambda: nn.Linear(8, 1)}

    with pytest.raises(TaskError, match="needs a model, but no worker of this job has one whole"):
        build_state(job(tmp_path, Layered, parallel=Parallel(sharded="full")), Layered(), CPU)


class ScheduleFree(torch.optim.SGD):
    """Has modes, as Schedule-Free optimizers have."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, r"LBFGS\.step\(\) needs a closure"),
        (torch.optim.SparseAdam, "SparseAdam needs sparse gradients"),
        (ScheduleFree, r"ScheduleFree has train\(\) and eval\(\)"),
        (lambda values: "SGD", r"optimizer\(\) returned str"),
    ],
)
def test_an_optimizer_that_a_run_cannot_step_is_refused(tmp_path: Path, make: Any, words: str) -> None:
    class Own(Plain):
        def optimizer(self, parameters: Any) -> Any:
            return make([value for _, value in parameters])

    with pytest.raises(TaskError, match=words):
        trial(tmp_path, Own)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: nn.LazyLinear(1), r"model\(\): '1' is a LazyLinear, which has no shape before its first batch"),
        (lambda: nn.SyncBatchNorm(4), r"model\(\): '1' is a SyncBatchNorm, which would not synchronise"),
    ],
)
def test_a_module_that_cannot_be_trained_here_is_refused(module: Any, words: str) -> None:
    class Own(Plain):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4), module())

    with pytest.raises(TaskError, match=words):
        build_model(Own(), 0, CPU)


@pytest.mark.parametrize("kept", ["scale", "losses.0", "criterion.weight"])
@pytest.mark.parametrize("layered", [False, True])
def test_a_parameter_of_the_task_itself_is_refused_by_name(tmp_path: Path, kept: str, layered: bool) -> None:
    class Own(Plain):
        def __init__(self) -> None:
            self.scale = nn.Parameter(torch.ones(1)) if kept == "scale" else torch.ones(1)
            self.losses = [nn.Parameter(torch.ones(1)) if kept == "losses.0" else torch.ones(1)]
            self.criterion: Any = nn.LayerNorm(4 if layered else 1) if kept == "criterion.weight" else abs
            self.unused = nn.Linear(2, 2)

        def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
            return self.criterion(model(batch["x"]) * self.scale * self.losses[0]).pow(2).sum()

    class Layers(Own):
        def layers(self) -> Any:
            self.kept = {name: nn.Linear(4, 4) for name in "ab"}
            return {name: lambda name=name: self.kept[name] for name in self.kept}

    task = Layers if layered else Own
    with pytest.raises(TaskError) as caught:
        trial(tmp_path, task, **({"parallel": Parallel(pipeline=2, schedule="gpipe")} if layered else {}))
    assert f"the task's own parameter '{kept.removesuffix('.0')}'" in caught.value.what


def test_parameters_of_a_task_that_its_loss_does_not_use_are_its_own_business(tmp_path: Path) -> None:
    class Own(Plain):
        def __init__(self) -> None:
            self.unused = nn.Linear(2, 2)

    assert trial(tmp_path, Own).rows == 4
