"""A step on a GPU: when the host waits, and that the bits are the same for any number of workers."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task, device_copies
from raytrain_plus.collective.exact import ExactSum
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.staged import StagedWorld
from raytrain_plus.collective.world import wait
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.device_clock import marks
from raytrain_plus.device_copies import BatchCopies, HostCopies, pinned
from raytrain_plus.install.gpu_probe import read_nvml, read_torch
from raytrain_plus.install.gpus import gpu_checks
from raytrain_plus.job.setting_types import Precision as Name
from raytrain_plus.job.setting_types import Recompute
from raytrain_plus.state.hostcopy import HostMemory
from raytrain_plus.state.named import named_state, state_sha256
from raytrain_plus.training.model.model import build_layers, build_model
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.norms import Norms
from raytrain_plus.training.weights.step_options import Technique
from raytrain_plus.workers.machine.gpu import gpu_of
from raytrain_plus.workers.machine.gpu_meter import read
from tests.gpu import DEVICE, NEEDS_GPU
from tests.support.worlds import Doubling
from tests.unit.training.group import Group, context
from tests.unit.training.sharded import HOLDERS, SHARDS, STEPS, Sharded, differing, joined, whole

pytestmark = [*NEEDS_GPU, pytest.mark.timeout(300)]

WIDTH, CLASSES, ROWS = 64, 8, 16
BUSY = 200_000_000
"""Cycles for which a GPU is kept busy: a tenth of a second."""


class Block(nn.Module):
    """Matrix products, dropout and normalizations, one of them with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH)
        self.second, self.after = nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(F.gelu(self.norm(self.first(x))), 0.1, self.training)
        return x + self.after(self.second(hidden))


class Classify(Task):
    """Layers, BatchNorm, dropout, a buffer that must not change, metrics on the device, and a fused optimizer."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {"first": Block, "second": Block, "head": lambda: nn.Linear(WIDTH, CLASSES)}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        fused = DEVICE.type == "cuda"
        return torch.optim.AdamW([value for _, value in parameters], lr=3e-3, fused=fused)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        scores = model(batch["x"]).float()
        right = (scores.detach().argmax(1) == batch["y"]).float().mean()
        return {"loss": F.cross_entropy(scores, batch["y"]), "metrics": {"accuracy": right}}


def state_of(shards: int, exact: bool = False, technique: Technique | None = None) -> TrainState:
    task, technique = Classify(), technique or Technique(Precision("fp32", DEVICE))
    built = build_model(task, 0, DEVICE)
    return TrainState(task, [built], Summing(shards, exact=exact), seed=0, technique=replace(technique, clip_norm=0.5))


def batches(step: int, hosted: Any) -> dict[int, list[Microbatch]]:
    """Return microbatches in pinned memory, as the reader makes them: the class is the largest of some columns."""
    made: dict[int, list[Microbatch]] = {}
    for shard in hosted:
        draw = torch.Generator().manual_seed(1000 * step + shard)
        x = torch.randn(2 * ROWS, WIDTH, generator=draw)
        both = {"x": x, "y": x[:, :CLASSES].argmax(1)}
        parts = [{name: value[half : half + ROWS] for name, value in both.items()} for half in (0, ROWS)]
        made[shard] = [Microbatch(pinned(part), ROWS) for part in parts]
    return made


def trained(steps: SynchronousSteps, count: int, shards: int, first: int = 0) -> list[float]:
    """Make some steps, and return their losses."""
    return [
        steps.run(step, batches(step, range(shards)), context(SoloWorld())).loss for step in range(first, first + count)
    ]


def sha(state: TrainState) -> str:
    assert state.optimizer is not None
    return state_sha256(named_state(state.module, state.optimizer, state.named))


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise an error where the host waits for the GPU, but in `device_copies.to_host`."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is copied from the GPU at the places where the host may wait."""
    found: list[int] = []
    plain = device_copies.to_host

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        found.append(tensor.numel())
        copy = plain(tensor)
        torch.cuda.set_sync_debug_mode(mode)
        return copy

    monkeypatch.setattr(device_copies, "to_host", to_host)
    return found


def make_one_step(steps: SynchronousSteps, reads: list[int]) -> None:
    """Make a step of two shards, after the first ones, in which the host waits only for `reads`."""
    trained(steps, 4, 2)
    given = batches(4, range(2))
    reads.clear()
    with no_waits():
        steps.run(4, given, context(SoloWorld()))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The settings of `reduction: exact`, for one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.fixture
def tf32_as_before() -> Iterator[None]:
    libraries: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [library.allow_tf32 for library in libraries]
    yield
    for library, allowed in zip(libraries, before, strict=True):
        library.allow_tf32 = allowed


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params", "fp16"])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shards", [1, 12])
def test_a_step_alone_makes_the_host_wait_once(reads: list[int], shards: int, exact: bool, precision: Name) -> None:
    steps = whole_steps(state_of(shards, exact, Technique(Precision(precision, DEVICE))))
    # The first steps measure grids, make room for the metrics, and load kernels.
    trained(steps, 3, shards)
    given = [batches(step, range(shards)) for step in range(3, 6)]
    reads.clear()
    with no_waits():
        for step, one in enumerate(given, 3):
            steps.run(step, one, context(SoloWorld()))
    assert len(reads) == 3


def test_a_wait_is_an_error_here() -> None:
    with pytest.raises(RuntimeError, match="synchronizing"), no_waits():
        float(torch.ones((), device=DEVICE))


@pytest.mark.usefixtures("deterministic")
def test_exact_sums_are_the_same_bits_on_any_number_of_workers() -> None:
    shards = 12
    alone = whole_steps(state_of(shards, exact=True))
    losses = trained(alone, 6, shards)
    group = Group(lambda: whole_steps(state_of(shards, exact=True)), batches, shards)
    group.train(6, random.Random(2), deaths=False)
    assert {sha(state) for state in group.states} == {sha(alone.state)}
    assert [group.losses[step] for step in range(6)] == losses


@pytest.mark.parametrize("shards", [1, 12])
def test_exact_sums_are_those_of_a_cpu(shards: int) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = {"a": 70_000, "b": 1, "c": 513}
    given = [[torch.randn(size, generator=draw) * 10.0**shard for size in sizes.values()] for shard in range(shards)]
    found = []
    for device in (torch.device("cpu"), DEVICE):
        exact = ExactSum(sizes, shards, device)
        exact.begin({"a": -30, "b": -20, "c": -25})
        for values in given:
            exact.add([value.to(device) for value in values])
        found.append((exact.total.cpu().numpy().tobytes(), exact.magnitudes.values(), exact.read()))
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "bf16-params", "fp16"])
@pytest.mark.usefixtures("tf32_as_before")
def test_every_precision_learns(precision: Name) -> None:
    chosen = Precision(precision, DEVICE)
    chosen.set_up()
    losses = trained(whole_steps(state_of(2, technique=Technique(chosen))), 60, 2)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.usefixtures("deterministic")
def test_layers_that_are_computed_again_give_the_same_bits() -> None:
    def hash_of(recompute: Recompute) -> str:
        technique = Technique(Precision("bf16", DEVICE), recompute=recompute)
        steps = whole_steps(state_of(2, exact=True, technique=technique))
        trained(steps, 4, 2)
        return sha(steps.state)

    assert hash_of("full") == hash_of("none")
    assert hash_of("selective") == hash_of("none")


def test_compiled_layers_learn_as_others_do() -> None:
    plain, compiled = (
        trained(whole_steps(state_of(2, technique=Technique(Precision("bf16", DEVICE), compiled=one))), 30, 2)
        for one in (False, True)
    )
    # Dropout draws other numbers.
    assert sum(compiled[-5:]) == pytest.approx(sum(plain[-5:]), rel=0.2)


def test_compiled_layers_make_the_host_wait_once(reads: list[int]) -> None:
    steps = whole_steps(state_of(2, technique=Technique(Precision("bf16", DEVICE), compiled=True)))
    make_one_step(steps, reads)
    assert len(reads) == 1


def test_a_copy_of_the_state_holds_nobody_up_and_is_the_state_between_the_steps() -> None:
    steps, memory = whole_steps(state_of(1)), HostMemory()
    state = steps.state
    trained(steps, 2, 1)
    memory.snapshot(1, state.holding())
    memory.wait()
    before = state.snapshot()
    given = batches(2, range(1))
    torch.cuda.synchronize()
    # The copies wait for the GPU, which is busy; the host does not.
    torch.cuda._sleep(BUSY)
    start = time.perf_counter()
    copied = memory.snapshot(1, state.holding())
    assert time.perf_counter() - start < 0.05
    steps.run(2, given, context(SoloWorld()))
    memory.wait()
    assert {name: data.tobytes() for name, (_, _, data) in copied.tensors.items()} == {
        name: data.tobytes() for name, (_, _, data) in before.tensors.items()
    }
    after = state.snapshot()
    assert any(after.tensors[name][2].tobytes() != data.tobytes() for name, (_, _, data) in before.tensors.items())


def test_pinned_batches_arrive_beside_the_computation() -> None:
    copies = BatchCopies(DEVICE)
    given = pinned({"x": torch.arange(1 << 20), "y": [torch.ones(3)]})
    with no_waits():
        torch.cuda._sleep(BUSY)
        found = copies(given)
        doubled = found["x"] * 2
    assert torch.equal(doubled.cpu(), 2 * torch.arange(1 << 20))
    assert found["y"][0].device == DEVICE


def test_a_sum_in_pinned_memory_waits_for_the_gpu_and_holds_nobody_up() -> None:
    world = StagedWorld(Doubling(), HostCopies(DEVICE)).start()
    tensors = [torch.zeros(1 << 20, device=DEVICE) for _ in range(3)]
    with no_waits():
        torch.cuda._sleep(BUSY)
        for number, tensor in enumerate(tensors):
            tensor.add_(number)
        works = [world.reduce(tensor, f"sum {number}") for number, tensor in enumerate(tensors)]
        assert not works[0].ended(0.0)
    wait(works, "a test", 10)
    doubled = [2 * tensor for tensor in tensors]
    assert [one.unique().tolist() for one in doubled] == [[0.0], [4.0], [8.0]]
    world.close()


def test_what_is_sent_from_a_gpu_is_what_was_computed() -> None:
    world = StagedWorld(Doubling(), HostCopies(DEVICE)).start()
    torch.cuda._sleep(BUSY)
    sent = torch.arange(1000.0, device=DEVICE).mul(3)
    world.send(sent, 1, 7).finish("a test")
    into = torch.empty_like(sent)
    world.receive(into, 1, 7).finish("a test")
    assert torch.equal(into, sent)
    world.close()


def test_times_are_those_of_the_gpu() -> None:
    mark = marks(DEVICE)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    begin, start = mark(), time.perf_counter()
    torch.cuda._sleep(BUSY)
    end = mark()
    requested_s = time.perf_counter() - start
    torch.cuda.synchronize()
    assert requested_s < begin.seconds_to(end) < 10


def test_norms_of_a_gpu_are_those_of_a_cpu() -> None:
    draw = torch.Generator().manual_seed(1)
    tensors = [torch.randn(size, generator=draw) * 1e20 for size in (1, 70_000, 33)]
    tensors += [torch.randn(9, generator=draw, dtype=torch.float64), torch.zeros(0), torch.tensor([float("nan")])]
    of_cpu, of_gpu = Norms(tensors).squares(), Norms([one.to(DEVICE) for one in tensors]).squares()
    assert of_gpu == pytest.approx(of_cpu, rel=1e-12, nan_ok=True)


def test_a_state_moves_between_a_gpu_and_a_newcomer() -> None:
    donor, newcomer = (whole_steps(state_of(2)) for _ in range(2))
    trained(donor, 3, 2)
    newcomer.state.adopt(donor.state.snapshot())
    assert sha(newcomer.state) == sha(donor.state)
    assert trained(newcomer, 1, 2, first=3) == pytest.approx(trained(donor, 1, 2, first=3), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16-params", "fp16"])
@pytest.mark.parametrize("full", [False, True], ids=["optimizer", "full"])
@pytest.mark.usefixtures("deterministic")
def test_states_in_pieces_have_the_bits_of_a_whole_one(full: bool, precision: Name) -> None:
    technique = Technique(Precision(precision, DEVICE), decay=0.9)
    expected, metrics = whole(technique, full)
    group = Sharded(technique, full=full)
    for _ in range(4):
        group.join()
    group.form(4)
    for _ in range(STEPS):
        found = group.step(False, random.Random(0), None)
    assert differing(joined([one.state for one in group.members.values()]), expected) == [], group.told
    assert found == metrics


class Wide(Task):
    """Layers of four megabytes each."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {f"layer{number}": lambda: nn.Linear(1024, 1024, bias=False) for number in range(8)}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=1e-3, fused=DEVICE.type == "cuda")

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = model(F.pad(batch["x"], (0, 1024 - 6))).float().square().mean()
        return found


def in_layers(task: Task, shards: int) -> SynchronousSteps:
    """Return the steps of a worker whose weights are in pieces."""
    return whole_steps(
        TrainState(
            task,
            (),
            Summing(shards),
            seed=0,
            technique=Technique(Precision("bf16", DEVICE), clip_norm=0.5),
            rebuild=lambda: build_layers(task, 0, DEVICE),
        )
    )


def test_weights_in_pieces_have_memory_only_while_their_layer_computes() -> None:
    layer, layers, members = 4 << 20, 8, 4
    before = torch.cuda.memory_allocated()
    group = Sharded(Technique(Precision("bf16", DEVICE)), full=True)
    group.make = lambda: in_layers(Wide(), SHARDS)
    for _ in range(members):
        group.join()
    group.form(members)
    group.step(False, random.Random(0), None)
    gc.collect()
    # Four bytes each of weight, gradient and two moments; each row has two holders.
    formula = 4 * layers * layer * HOLDERS
    held = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    group.step(False, random.Random(1), None)
    peak = torch.cuda.max_memory_allocated() - before
    print(f"formula {formula >> 20} MiB, held {held >> 20} MiB, peak {peak >> 20} MiB of {members} workers together")
    assert held <= 1.1 * formula
    # Of each worker: two layers, what is sent of them, their gradients and sums.
    assert peak <= 1.1 * formula + members * 8 * layer


def test_weights_in_pieces_make_the_host_wait_twice(reads: list[int]) -> None:
    steps = in_layers(Classify(), 2)
    steps.state.begin_with(steps.state.trained.rows)
    make_one_step(steps, reads)
    # For the weight of the shards, and for the norms of all layers.
    assert len(reads) == 2


def test_the_doctor_finds_this_gpu_sound() -> None:
    nvml = pytest.importorskip("pynvml")
    checks = gpu_checks(read_nvml(nvml), read_torch(torch))
    print("\n".join(line for check in checks for line in check.lines()))
    status = {check.name: check.status for check in checks}
    assert (status["NVIDIA driver"], status["NCCL"], status["sum over GPUs"]) == ("PASS", "PASS", "PASS")


def test_nvml_knows_this_gpu_by_the_uuid_that_torch_reports() -> None:
    nvml = pytest.importorskip("pynvml")
    nvml.nvmlInit()
    try:
        found = gpu_of(DEVICE)
        assert found is not None
        gpu = nvml.nvmlDeviceGetHandleByUUID(found.uuid)
        assert nvml.nvmlDeviceGetName(gpu) == found.model == torch.cuda.get_device_name(DEVICE)
        held = torch.zeros(2**28, dtype=torch.uint8, device=DEVICE)
        use = read(nvml, gpu)
    finally:
        nvml.nvmlShutdown()
    assert use.memory_bytes is not None
    assert use.memory_bytes >= held.nbytes
