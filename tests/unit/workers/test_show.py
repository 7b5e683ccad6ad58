"""What the task shows never costs the model."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from raytrain_plus.runs.folder import MODEL
from raytrain_plus.workers.preparation.prepared import Prepared
from raytrain_plus.workers.preparation.show import show_model
from tests.support.exact_steps import Small, state_of
from tests.support.precisions import Classifier, steps_of
from tests.unit.workers.members import member


class Shows(Small):
    def show(self, model: nn.Module) -> str:
        assert not model.training
        return said_of(model.state_dict())


class Fails(Small):
    def __init__(self, kind: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.kind = kind

    def show(self, model: nn.Module) -> str:
        raise self.kind("no picture")


def said_of(weights: Mapping[str, torch.Tensor]) -> str:
    return f"the sum of the first weights is {float(weights['first.weight'].sum())}"


def holder(folder: Path, task: Small) -> Prepared:
    return member(folder, build=lambda layers: state_of(task))


def test_a_task_that_shows_nothing_needs_no_model(tmp_path: Path) -> None:
    assert show_model(holder(tmp_path, Small()), 7, in_use=False) is None


def test_the_model_that_the_worker_holds_is_shown_unless_it_is_in_use(tmp_path: Path) -> None:
    prepared = holder(tmp_path, Shows())
    assert show_model(prepared, -1, in_use=False) == said_of(prepared.own.state.module.state_dict())
    assert show_model(prepared, -1, in_use=True) is None


def test_a_model_that_nobody_holds_whole_is_loaded_from_the_runs_folder(tmp_path: Path) -> None:
    prepared = holder(tmp_path, Shows())
    said = show_model(prepared, 7, in_use=True)
    assert said is not None
    assert said.startswith("the whole model could not be assembled for Task.show: ")
    (tmp_path / "run").mkdir()
    weights = {name: value + 1 for name, value in prepared.own.state.module.state_dict().items()}
    safetensors.torch.save_file(weights, tmp_path / "run" / MODEL)
    assert show_model(prepared, 7, in_use=True) == said_of(weights)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_to_show_is_told_in_its_place(tmp_path: Path, kind: type[BaseException]) -> None:
    prepared = holder(tmp_path, Fails(kind))
    with ThreadPoolExecutor(max_workers=1) as thread:
        said = thread.submit(show_model, prepared, -1, in_use=False).result()
    assert said is not None
    assert said.startswith("Task.show failed: ")
    assert f"the task raised {kind.__name__}: no picture" in said


class Computes(Classifier):
    """Shows what its model computes from float32 values."""

    def show(self, model: nn.Module) -> str:
        found: torch.Tensor = model(torch.ones(1, 6))
        return f"{found.float().sum():.3f}"


def test_a_model_with_rounded_weights_computes_from_the_same_inputs(tmp_path: Path) -> None:
    rounded, plain = (
        member(tmp_path, build=lambda layers, name=name: steps_of(name, Computes()).state)
        for name in ("bf16-params", "fp32")
    )
    said = [show_model(prepared, -1, in_use=False) for prepared in (rounded, plain)]
    assert float(said[0] or "nan") == pytest.approx(float(said[1] or "nan"), abs=0.02)
