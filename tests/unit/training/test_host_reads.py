"""How often a step makes the host wait for its device: each number that the host reads from a GPU costs a wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raytrain_plus import Task, device_copies
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.observe.expert_use import ExpertUse
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.passes import microbatch_loss, task_loss
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique
from tests.unit.training.group import context

CPU = torch.device("cpu")
READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "unique2", "_unique2")
"""Operations whose result the host needs."""
METHODS = ("tolist", "numpy", "cpu", "item", "__bool__", "__float__", "__int__", "__index__")


class Device(TorchDispatchMode):
    """Has the memory of some tensors, and all that is computed from it, be that of a device; counts what is read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.reads: list[str] = []
        self._memory: dict[int, torch.UntypedStorage] = {}
        patch.setattr(device_copies, "to_host", self._to_host)
        patch.setattr(microbatch_loss, "BatchCopies", lambda device: lambda batch: self.take(batch.clone()))
        for name in METHODS:
            patch.setattr(torch.Tensor, name, self._read(name))

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor on the device."""
        storage = tensor.untyped_storage()
        # What lives keeps its address.
        self._memory[storage._cdata] = storage
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_device = any(self.has(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
        if of_device and func._schema.name.removeprefix("aten::") in READS:
            self.reads.append(func._schema.name)
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result) if of_device else ():
            if isinstance(one, torch.Tensor):
                self.take(one)
        return result

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.has(tensor), "nothing else is worth a copy"
        self.reads.append("to_host")
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy.detach().__array__()[...] = plain["numpy"](tensor)
        return copy

    def _read(self, name: str) -> Any:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.has(tensor):
                self.reads.append(name)
            return plain[name](tensor, *args, **kwargs)

        return read


plain = {name: getattr(torch.Tensor, name) for name in METHODS}


class Net(nn.Module):
    """Layers with buffers of each rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("fixed", torch.ones(2))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.last.fill_(1.0).mul_(x.mean())
        return self.layers(x)


class Fit(Task):
    def __init__(self, returns: str = "loss") -> None:
        self.returns = returns

    def model(self) -> nn.Module:
        return Net()

    def buffer_rule(self, name: str) -> Any:
        return {"fixed": "refuse", "last": "first"}.get(name)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        found = model(batch).square().mean()
        if self.returns == "loss":
            return found
        given = {"loss": found, "metrics": {"twice": 2 * found}}
        return {**given, "weight": (batch > 0).sum()} if self.returns == "weight" else given


class Pair(SoloWorld):
    """A world whose other member adds nothing: it hosts no shards."""

    size = 2


def steps_of(task: Task, shards: int, exact: bool) -> SynchronousSteps:
    built = build_model(task, 0, CPU)
    return whole_steps(
        TrainState(
            task, [built], Summing(shards, exact=exact, bucket_bytes=64), seed=0, technique=Technique(clip_norm=1e-3)
        )
    )


def batches(shards: int, step: int) -> dict[int, list[Microbatch]]:
    draw = torch.Generator().manual_seed(step)
    return {shard: [Microbatch(torch.randn(6, 4, generator=draw), 6) for _ in range(2)] for shard in range(shards)}


@pytest.fixture
def device() -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        yield Device(patch)


def reads_of(device: Device, steps: SynchronousSteps, shards: int, world: SoloWorld) -> list[str]:
    """Return what the third step reads; the first two measure the grids, and make room for the metrics."""
    for step in range(3):
        given = batches(shards, step)
        device.reads.clear()
        with device:
            for part in steps.state.parts:
                for value in (*part.module.parameters(), *part.module.buffers(), *part.buffers.committed.values()):
                    device.take(value)
                for _, view in part.gradients._views:
                    device.take(view)
                for one in part.gradients._wires:
                    device.take(one.rider)
                    device.take(one.given)
            steps.run(step, given, context(world))
    return device.reads


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shards", [1, 12])
@pytest.mark.parametrize("returns", ["loss", "metrics"])
def test_a_step_alone_reads_once(device: Device, shards: int, exact: bool, returns: str) -> None:
    assert reads_of(device, steps_of(Fit(returns), shards, exact), shards, SoloWorld()) == ["to_host"]


class Choosing(nn.Module):
    """Counts the choices of experts, without any."""

    summed_buffers = ("tally",)

    def __init__(self) -> None:
        super().__init__()
        self.tally: torch.Tensor
        self.register_buffer("tally", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tally[0] += len(x)
        return x

    def begin_step(self, loss_factor: float) -> None:
        pass

    def end_step(self) -> None:
        self.tally.zero_()

    def use_of(self, tally: Sequence[float]) -> ExpertUse:
        return ExpertUse(load=[int(one) for one in tally], dropped=0, entropy=0.0, capacity=None)


class Routes(Fit):
    def model(self) -> nn.Module:
        return nn.Sequential(Choosing(), Net())

    def buffer_rule(self, name: str) -> Any:
        return super().buffer_rule(name.removeprefix("1."))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shards", [1, 12])
def test_what_routers_count_is_read_with_the_rest(device: Device, shards: int, exact: bool) -> None:
    assert reads_of(device, steps_of(Routes(), shards, exact), shards, SoloWorld()) == ["to_host"]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shards", [1, 12])
def test_a_weight_that_is_a_tensor_is_read_before_the_norms(device: Device, shards: int, exact: bool) -> None:
    assert reads_of(device, steps_of(Fit("weight"), shards, exact), shards, SoloWorld()) == ["to_host"] * 2


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shards", [1, 12])
def test_in_a_group_the_losses_are_read_for_the_header_and_the_sums_before_the_norms(
    device: Device, shards: int, exact: bool
) -> None:
    assert reads_of(device, steps_of(Fit("weight"), shards, exact), shards, Pair()) == ["to_host"] * 3


class Counted(Fit):
    """Its metrics are one tensor, which it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        self.count += 1
        return {"loss": model(batch).square().mean(), "weight": self.count, "metrics": {"count": self.count}}


def test_what_the_task_changes_later_is_reported_as_it_was() -> None:
    applied = steps_of(Counted(), 2, False).run(0, batches(2, 0), context(SoloWorld()))
    assert applied.metrics == {"count": (1 + 4 + 9 + 16) / 10}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_runs_of_older_versions_a_weight_weighs_the_same_as_a_tensor(dtype: torch.dtype) -> None:
    for weight in (3, 0.1, 1e-40, 7.0**20):
        for factor in (1.0, 2.0**-13):
            found = []
            for given in (float(weight), torch.tensor(weight, dtype=torch.float64)):
                value = torch.tensor(1 / 3, dtype=dtype, requires_grad=True)
                weighted, left = task_loss.TaskLoss(value * value, given, {}).objective(factor, mean=False)
                assert left == 1.0
                weighted.backward()
                assert value.grad is not None
                found.append((weighted.dtype, weighted.tolist(), value.grad.tolist()))
            assert found[0] == found[1]


def test_a_step_whose_shards_change_a_buffer_that_must_not_is_not_applied() -> None:
    class Changes(Fit):
        def loss(self, model: Any, batch: torch.Tensor) -> Any:
            model.fixed += 1
            return super().loss(model, batch)

    for world in (SoloWorld(), Pair()):
        steps = steps_of(Changes(), 2, False)
        with pytest.raises(TrainingError, match="'fixed' changed in a forward pass"):
            steps.run(0, batches(2, 0), context(world))
        assert steps.state.last_applied == -1


def test_copies_of_the_state_end_before_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of(Fit(), 1, False)
    state = steps.state
    seen: list[list[torch.Tensor]] = []

    def now() -> list[torch.Tensor]:
        held = state.holding()
        return [value.detach().clone() for value in (*held.buffers.values(), *(value for _, value in held.parameters))]

    monkeypatch.setattr(state.holding().copies, "before_change", lambda: seen.append(now()))
    before = now()
    steps.run(0, batches(1, 0), context(SoloWorld()))
    assert [torch.equal(*pair) for pair in zip(seen[0], before, strict=True)] == [True] * len(before)
    after = now()
    assert not torch.equal(
        torch.cat([one.reshape(-1) for one in after]), torch.cat([one.reshape(-1) for one in before])
    )
    state.adopt(steps_of(Fit(), 1, False).state.snapshot())
    assert [torch.equal(*pair) for pair in zip(seen[1], after, strict=True)] == [True] * len(before)
