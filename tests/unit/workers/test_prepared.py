"""A prepared worker has all that it needs, and knows what its part of the model costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pyarrow as pa
import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.errors import TaskError
from raytrain_plus.job.settings import Parallel, Workers
from raytrain_plus.parallel.pipeline.message import KNOWN
from raytrain_plus.workers.messages import WHOLE, Outcome, Plan
from raytrain_plus.workers.preparation.prepared import prepare_worker
from tests.unit.workers.members import member, plan_of


class Layered(Task):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {"first": lambda: nn.Linear(1, 4), "last": lambda: nn.Linear(4, 1)}

    def collate(self, table: pa.Table) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(table.num_rows, 1)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).mean()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(1, dtype=torch.complex128))


class Unstorable(Layered):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return super().layers() | {"table": Complex}


def of(plan: Plan, task: type[Task]) -> Plan:
    return replace(plan, pickled_task=cloudpickle.dumps(task))


def test_a_worker_whose_model_is_whole_holds_its_initial_state(tmp_path: Path) -> None:
    prepared, ready = prepare_worker("worker-0", of(plan_of(tmp_path), Layered))
    assert (ready.parameters, ready.state_bytes, ready.layers) == (13, 3 * 13 * 4, ())
    assert ready.sights.keys() == {str(tmp_path / "data"), str(tmp_path / "held_out")}
    outcome = prepared.outcome("paused")
    assert (outcome.holds, outcome.stage, outcome.ready, outcome.copy) == (-1, WHOLE.stage, None, None)
    assert prepared.classes == KNOWN
    assert prepared.task.run.total_steps == plan_of(tmp_path).steps


def test_a_worker_whose_model_has_stages_measures_its_layers_and_holds_nothing(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    job = replace(plan.job, parallel=Parallel(pipeline=2), workers=Workers(min=2))
    prepared, ready = prepare_worker("worker-0", of(replace(plan, job=job), Layered))
    assert [layer.name for layer in ready.layers] == ["first", "last"]
    assert ready.parameters == 13
    assert ready.room > 0
    assert prepared.own.now is None
    assert prepared.outcome("interrupted") == Outcome(holds=None, why="interrupted")


class Tied(Layered):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {
            "first": lambda: nn.Linear(1, 2),
            "embed": lambda: nn.Linear(2, 3),
            "middle": lambda: nn.Linear(3, 2),
            "last": lambda: nn.Linear(2, 3),
        }

    def tied(self) -> dict[str, str]:
        return {"last.weight": "embed.weight"}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_tied_parameter_counts_once(tmp_path: Path, stages: int) -> None:
    plan = plan_of(tmp_path)
    job = replace(plan.job, parallel=Parallel(pipeline=stages), workers=Workers(min=stages))
    _, ready = prepare_worker("worker-0", of(replace(plan, job=job), Tied))
    assert ready.parameters == 4 + 9 + 8 + 3
    # Each copy has a gradient, and a state of the optimizer.
    sizes = [4, 9, 8, 9]
    if stages == 1:
        assert ready.state_bytes == 3 * sum(sizes) * 4
    else:
        assert [layer.parameters for layer in ready.layers] == sizes
        assert [layer.own_parameters for layer in ready.layers] == [4, 9, 8, 3]


class Plateau(Layered):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def test_a_scheduler_that_needs_a_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"ReduceLROnPlateau.step\(\) needs 'metrics'"):
        prepare_worker("worker-0", of(plan_of(tmp_path), Plateau))


def test_a_state_that_no_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="which a checkpoint cannot hold"):
        prepare_worker("worker-0", of(plan_of(tmp_path), Unstorable))


def test_an_outcome_says_what_is_copied_and_saved(tmp_path: Path) -> None:
    prepared = member(tmp_path)
    prepared.copier.begin(0, WHOLE.stage, True, None, lambda sent: None)
    prepared.copier.copy(-1, lambda: None)
    while prepared.copier.find(-1, WHOLE.stage) is None:
        pass
    assert prepared.outcome("paused").copy == -1
