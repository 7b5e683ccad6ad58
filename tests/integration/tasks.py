"""Tasks and data of the real runs in these tests."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections import OrderedDict, UserDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task, WeightFiles
from raytrain_plus.collective.horovod_world import HorovodWorld
from raytrain_plus.data.reading.reader import PREFETCH_STEPS
from raytrain_plus.data.values.collate import pad
from raytrain_plus.layers import Experts
from raytrain_plus.parallel.pipeline.transport import Handovers
from raytrain_plus.ray_compat import drain_this_node
from raytrain_plus.storage.folders import local
from raytrain_plus.torch_compat import compiled_graphs
from raytrain_plus.training.passes.stage import ReplicaStage
from raytrain_plus.training.passes.step_work import StepWork
from raytrain_plus.workers.machine.notices import listen


class Whole(nn.Sequential):
    """A module that runs like a sequence but does not expose its layers."""


class Net(Task):
    """A model with BatchNorm and dropout, so that buffers and random keys matter; named layers have their own keys."""

    def __init__(self, named: bool = True, explode_at: float | None = None, plain: bool = False) -> None:
        """Without `named` the model is whole, or, if it is `plain`, a sequence, whose modules are its layers."""
        self.named = named
        self.plain = plain
        self.explode_at = explode_at

    def parts(self) -> dict[str, Any]:
        return {
            # No bias in front of BatchNorm: its gradient would be nothing but rounding, which AdamW blows up to full
            # steps, and evaluation would show them.
            "first": lambda: nn.Linear(6, 16, bias=False),
            "norm": lambda: nn.BatchNorm1d(16),
            "drop": lambda: nn.Dropout(0.3),
            # No kink: a ReLU whose input is as small as the rounding of a sum takes another side in another group.
            "last": lambda: nn.Sequential(nn.Tanh(), nn.Linear(16, 3)),
        }

    def layers(self) -> dict[str, Any] | None:
        return self.parts() if self.named else None

    def model(self) -> nn.Module:
        return (nn.Sequential if self.plain else Whole)(*(build() for build in self.parts().values()))

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        if self.explode_at is not None and bool((batch["x"][:, 0] > self.explode_at).any()):
            return loss * float("nan")
        return loss


def in_trial() -> bool:
    """Return whether the platform tries the task, before the run begins."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "try_task":
        frame = frame.f_back
    return frame is not None


class Raises(Net):
    """A task that fails as users' code does."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "init":
            raise ValueError("no such width")

    def layers(self) -> dict[str, Any] | None:
        if self.where == "layers":
            raise ZeroDivisionError("in layers")
        return super().layers()

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.where == "loss":
            raise KeyError("label")
        if self.where == "step" and not in_trial():
            raise KeyboardInterrupt("enough")
        return super().loss(model, batch)


class Secretive(Net):
    """A task with a secret argument."""

    def __init__(self, word: str) -> None:
        super().__init__()
        if word != "open sesame":
            raise ValueError("not the word")


class Repeats(Net):
    """A task that fails as a client library does: its error repeats the address that it received."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if in_trial():
            return super().loss(model, batch)
        raise ConnectionError(f"no answer from '{self.address}'")


class Sleeps(Net):
    """A slow task, so that it can be interrupted."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(0.05)
        return super().loss(model, batch)


class SlowDisk(Sleeps):
    """The same on workers whose disk takes some seconds for a checkpoint."""

    def parts(self) -> dict[str, Any]:
        def fsync(disk: local.Disk, file: int) -> None:
            time.sleep(0.4)
            os.fsync(file)

        # Only workers write checkpoints; the controller never builds a task.
        local.Disk.fsync, local.SYNC_BYTES = fsync, 300  # type: ignore[method-assign]
        return super().parts()


class Paced(Sleeps):
    """The same with layers that allow overlapping steps: without running statistics."""

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "norm": lambda: nn.LayerNorm(16)}


class Faulty(Net):
    """A task with faults: `fault` happens once, in the first process that reaches it; with `always`, each time after,
    and with "here" only in that process.

    A `fault` is "where:what:after": after that many calls of a place (loss, backward, apply, applied, snapshot, adopt,
    evaluate; mesh: a newcomer's first batches, made while its world forms) in a process, do this (kill, stop, raise,
    device, assert, memory, loop, hold, rename, sleep). Every process that computes leaves a file; one that starts when
    there is a file "late" is a newcomer.
    """

    def __init__(
        self, folder: str, fault: str = "", always: bool | str = False, pad_s: float = 0.0, double: bool = False
    ) -> None:
        super().__init__()
        self.folder, self.fault, self.always, self.pad_s, self.double = Path(folder), fault, always, pad_s, double
        self.calls: dict[str, int] = {}
        self.late = (self.folder / "late").exists()
        if not in_trial():
            with (self.folder / f"built-{os.getpid()}").open("a") as file:
                file.write("built\n")
        self.reach("build")

    def parts(self) -> dict[str, Any]:
        parts = super().parts()
        return {name: lambda build=build: build().double() for name, build in parts.items()} if self.double else parts

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        task = self

        class Optimizer(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                task.reach("apply")
                done = super().step(closure)
                task.reach("applied")
                return done

        return Optimizer(parameters, lr=1e-2)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        task = self

        class Scheduler(torch.optim.lr_scheduler.ExponentialLR):
            def state_dict(self) -> dict[str, Any]:
                task.reach("snapshot")
                return super().state_dict()

            def load_state_dict(self, state: dict[str, Any]) -> None:
                task.reach("adopt")
                super().load_state_dict(state)
                (task.folder / f"adopted-{os.getpid()}").touch()

        return Scheduler(optimizer, 0.99)

    def collate(self, table: pa.Table) -> Any:
        self.calls["collate"] = self.calls.get("collate", 0) + 1
        # The warm-up step takes one microbatch; no more than the prefetched ones are made for it.
        if self.late and self.calls.get("loss") == 1 and self.calls["collate"] > PREFETCH_STEPS + 2:
            self.reach("mesh")
        batch = super().collate(table)
        return {**batch, "x": batch["x"].double()} if self.double else batch

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        self.reach("evaluate")
        return {"loss": super().loss(model, batch)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if "loss" not in self.calls:
            (self.folder / f"computes-{os.getpid()}").touch()
        self.reach("loss")
        if self.pad_s:
            time.sleep(self.pad_s)
        return _Reached.apply(super().loss(model, batch), self)  # type: ignore[no-any-return]

    def reach(self, place: str) -> None:
        """Perform the fault that is due at this place."""
        where, _, rest = self.fault.partition(":")
        what, _, after = rest.partition(":")
        self.calls[place] = self.calls.get(place, 0) + 1
        late = self.calls[place] - int(after or 0)
        if place != where or late < 1 or (late > 1 and not self.always) or in_trial():
            return
        if self.always is not True:
            try:
                with (self.folder / "fault").open("x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                if self.always != "here" or (self.folder / "fault").read_text() != str(os.getpid()):
                    return
        with (self.folder / f"reached-{os.getpid()}").open("a") as file:
            file.write(f"{place}\n")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "raise":
            raise ValueError(f"a fault in {place}")
        elif what == "device":
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ...")
        elif what == "assert":
            # The GPU finds it later, and from then on computes nothing for this process.
            torch._assert_async(torch.zeros((), device="cuda"))
        elif what == "memory":
            raise MemoryError("cannot allocate 64 GiB")
        elif what == "rename":
            # This process's next sum has a different name from the others': all wait forever.
            reduce = HorovodWorld.reduce

            def renamed(world: HorovodWorld, tensor: torch.Tensor, name: str, operation: Any = "sum") -> Any:
                HorovodWorld.reduce = reduce  # type: ignore[method-assign]
                return reduce(world, tensor, f"{name}, renamed", operation)

            HorovodWorld.reduce = renamed  # type: ignore[method-assign]
        elif what == "loop":
            while True:
                time.sleep(0.01)
        elif what == "hold":
            # A call into C that holds the interpreter's lock.
            ctypes.PyDLL(None).sleep(600)
        else:
            time.sleep(float(what.removeprefix("sleep")))


class Located(Faulty):
    """A task that leaves a file with the device on which it computes."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().loss(model, batch)
        if not in_trial():
            (self.folder / f"device-{os.getpid()}").write_text(f"{batch['x'].device} {loss.device}")
        return loss


class Derails(Faulty):
    """A task with a finite loss and a gradient that is not finite.

    This happens in the step after a number of applied ones, or whenever a row's first value exceeds `above`.
    """

    def __init__(self, folder: str, after: int | None = None, above: float = math.inf, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.after, self.above = after, above

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        self.made = super().optimizer(parameters)
        return self.made

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        applied = max((int(state["step"]) for state in self.made.state.values()), default=0)
        loss = super().loss(model, batch)
        if applied != self.after and not bool((batch["x"][:, 0] > self.above).any()):
            return loss
        weight = next(value for name, value in model.named_parameters() if name == "last.1.weight")
        # The derivative of a root is infinite at 0.
        return loss + (weight - weight.detach()).abs().sqrt().sum()


class Encoded(UserDict[str, Any]):
    """A batch of its own class, as tokenizers return: a mapping that moves itself."""

    def to(self, device: torch.device) -> Encoded:
        return Encoded({key: value.to(device) for key, value in self.data.items()})


class Encodes(Faulty):
    """The same task with batches of that class."""

    def collate(self, table: pa.Table) -> Any:
        return Encoded(super().collate(table))


THREADS = os.environ.get("OMP_NUM_THREADS", "nan")
"""The limit of threads that a library found if it was loaded with this module."""


class Threads(Faulty):
    """A task that reports how many threads a library may use that was loaded with it, or is loaded now."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        now = os.environ.get("OMP_NUM_THREADS", "nan")
        return {"loss": super().loss(model, batch), "metrics": {"loaded": float(THREADS), "now": float(now)}}


class Mlp(nn.Module):
    """A network that can be cut into slices, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return found


class FaultySlices(Faulty):
    """Faulty, with a layer that is cut into slices."""

    def parts(self) -> dict[str, Any]:
        parts = super().parts()
        return {**{name: parts[name] for name in ("first", "norm", "drop")}, "mlp": Mlp, "last": parts["last"]}

    def tensor(self) -> dict[str, str]:
        return {"mlp.up": "colwise", "mlp.down": "rowwise"}


class FaultyExperts(Faulty):
    """Faulty, with two layers of eight experts."""

    def parts(self) -> dict[str, Any]:
        parts = super().parts()
        sparse = {
            "switch": lambda: Experts(16, 64, 8, top_k=1, capacity=1.25, jitter=0.01),
            "mixture": lambda: Experts(16, 64, 8, top_k=2, balance="loss", z_loss=1e-3, shared=1),
        }
        return {**{name: parts[name] for name in ("first", "norm", "drop")}, **sparse, "last": parts["last"]}


class FaultyStage(Faulty):
    """A task with faults in one of two stages, also at the places of a step in stages.

    F0 to F15 and B0 to B15: the passes of its microbatches; summed: the worker has its sums; agreed: all of its ring
    have; exchanged: all of its replica have.
    """

    def __init__(self, folder: str, stage: int, fault: str = "", pad_s: float = 0.0) -> None:
        self.stage, self.mine = stage, -1
        super().__init__(folder, fault, pad_s=pad_s)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        named = list(parameters)
        self.mine = int(not any(name.startswith("first.") for name, _ in named))
        computing, agree, send = StepWork.computing, ReplicaStage.agree, Handovers.send_note
        task = self

        @contextmanager
        def noted(work: Any, kind: Any, chunk: int, number: int, *weight: Any) -> Iterator[None]:
            task.reach(f"{kind}{number}")
            with computing(work, kind, chunk, number, *weight):
                yield

        def summed(*arguments: Any) -> Any:
            task.reach("summed")
            found = agree(*arguments)
            task.reach("exchanged")
            return found

        def sends(handovers: Any, kind: Any, *arguments: Any) -> None:
            if kind == "agreed":
                task.reach("agreed")
            send(handovers, kind, *arguments)

        StepWork.computing = noted  # type: ignore[method-assign,assignment]
        ReplicaStage.agree = summed  # type: ignore[method-assign]
        Handovers.send_note = sends  # type: ignore[method-assign]
        return super().optimizer(named)

    def reach(self, place: str) -> None:
        if self.mine == self.stage or place == "build":
            super().reach(place)


class Flowing(Faulty):
    """Layers that allow overlapping steps: without running statistics."""

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "norm": lambda: nn.LayerNorm(16)}


class Wide(Faulty):
    """A model with 50 MB of weights and optimizer state."""

    def parts(self) -> dict[str, Any]:
        return {
            "first": lambda: nn.Linear(6, 1024),
            "wide": lambda: nn.Sequential(nn.ReLU(), nn.Linear(1024, 4096)),
            "last": lambda: nn.Sequential(nn.ReLU(), nn.Linear(4096, 3)),
        }


class Heavy(Task):
    """100 million parameters in layers of 4 million."""

    WIDTH, DEPTH = 2048, 24

    def layers(self) -> dict[str, Any]:
        middle = {f"middle{number}": lambda: nn.Sequential(nn.Linear(self.WIDTH, self.WIDTH), nn.Tanh())
                  for number in range(self.DEPTH)}  # fmt: skip
        return {"first": lambda: nn.Linear(6, self.WIDTH), **middle, "last": lambda: nn.Linear(self.WIDTH, 3)}

    def optimizer(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=1e-4)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])


class HeavyExperts(Heavy):
    """100 million parameters, all but a hundredth of a percent in experts."""

    def layers(self) -> dict[str, Any]:
        sparse = {f"experts{number}": lambda: Experts(512, 2048, 8, top_k=1) for number in range(4)}
        return {"first": lambda: nn.Linear(6, 512), **sparse, "last": lambda: nn.Linear(512, 3)}


class Noticed(Faulty):
    """A task whose workers query a metadata service as in a cloud, ten times as often: `services` maps node id to host
    and port."""

    def __init__(self, folder: str, cloud: Any, services: dict[str, Any], pad_s: float = 0.0) -> None:
        super().__init__(folder, pad_s=pad_s)
        host, port = services[ray.get_runtime_context().get_node_id()]

        def wait(seconds: float) -> None:
            time.sleep(seconds / 10)

        threading.Thread(target=listen, args=(cloud, (host, port), drain_this_node, wait), daemon=True).start()


class Stumbles(Net):
    """A task that raises at random, a different error each time."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.chance = random.Random(os.getpid())

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.chance.random() < 0.01 and not in_trial():
            raise type(f"Error{self.chance.randrange(10**9)}", (ValueError,), {})("stumbled")
        return super().loss(model, batch)


class _Reached(torch.autograd.Function):
    """The identity, which notifies its task in the backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, task: Faulty) -> torch.Tensor:
        ctx.task = task
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.task.reach("backward")
        return gradient, None


class Mixed(nn.Module):
    """A layer of complex numbers between layers of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 16).bfloat16()
        self.turn = nn.Parameter(torch.ones(16, dtype=torch.complex64))
        self.out = nn.Linear(16, 3).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.into(x.bfloat16()).float() * self.turn
        found: torch.Tensor = self.out((turned.real + turned.imag.tanh()).bfloat16())
        return found.float()


class MixedDtypes(Net):
    """Parameters of several dtypes, and a metric of the imaginary ones, which begin at zero."""

    def parts(self) -> dict[str, Any]:
        return {"all": Mixed}

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"loss": super().loss(model, batch), "imaginary": model.get_parameter("all.turn").imag.abs().mean()}


def noisy(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    """Add random noise to the rows, as an augmentation."""
    x = np.stack(table.column("x").to_numpy(zero_copy_only=False))
    x = x + rng.normal(size=x.shape).astype("float32") * 0.1
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])
    return table.set_column(table.schema.get_field_index("x"), "x", column)


def write_data(folder: Path, rows: int = 500, files: int = 3, group: int = 20, seed: int = 0) -> Path:
    """Write Gaussian blobs of three classes; return the folder."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    labels = rng.integers(0, 3, rows)
    points = (rng.normal(size=(rows, 6)) + labels[:, None]).astype("float32")
    for number, chosen in enumerate(np.array_split(np.arange(rows), files)):
        x = pa.FixedSizeListArray.from_arrays(pa.array(points[chosen].reshape(-1)), 6)
        table = pa.table({"x": x, "y": pa.array(labels[chosen], pa.int64())})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group, write_page_checksum=True)
    return folder


def shaken(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    """Add noise from the generators of the process, as libraries of image transforms draw theirs."""
    x = np.stack(table.column("x").to_pylist())
    x += np.random.normal(size=x.shape) * 0.1 + torch.rand(len(x), 1).numpy() + random.random()
    made = pa.FixedSizeListArray.from_arrays(pa.array(x.astype("float32").reshape(-1)), x.shape[1])
    return table.set_column(table.schema.get_field_index("x"), "x", made)


class Slow(Net):
    """Each loss takes a little longer."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if torch.is_grad_enabled():
            time.sleep(0.01)
        return super().loss(model, batch)


class Rated(Net):
    """A task with a learning rate, which falls."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=self.lr)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Unkeyed(Net):
    """A task that draws from a generator that no key seeds."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(model, {**batch, "x": batch["x"] + random.SystemRandom().gauss(0, 0.1)})


class Remembers(Net):
    """A task that changes an attribute, not a buffer: its value depends on how many shards its process has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 1.0

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen *= 1.001
        return super().loss(model, batch) * self.seen


class Timed(Net):
    """A task whose result depends on the clock, as with a kernel that sums in varying order."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(model, batch) * (1 + 1e-6 * (time.perf_counter_ns() % 1000))


class Steep(Faulty):
    """For some rows, the gradients of scaled losses overflow float16; each such backward pass is a place "steep"."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.reach("loss")
        time.sleep(self.pad_s)
        scores = _Slope.apply(model(batch["x"]), 64.0 if bool((batch["x"][:, 0] > 2).any()) else 1.0, self)
        return F.cross_entropy(scores.float(), batch["y"])


class _Slope(torch.autograd.Function):
    """The identity; its derivative is as given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float, task: Steep) -> torch.Tensor:
        ctx.slope, ctx.task = slope, task
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.slope > 1:
            ctx.task.reach("steep")
        return gradients[0] * ctx.slope, None, None


class Counts(Faulty):
    """Notes how many graphs torch has compiled in this process, once a step and before each evaluation."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not in_trial():
            with (self.folder / f"graphs-{os.getpid()}").open("a") as file:
                file.write(f"{compiled_graphs()}\n")
        return super().loss(model, batch)


class Mortal(Net):
    """A task that kills every process but the first at random.

    It does so just after a step has changed the state ("applied"), or after that was reported as well ("told"). It
    leaves a file with the time and the step.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.chance = random.Random(os.getpid())
        self.step = -1
        self.telling = False

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        made = super().optimizer(parameters)
        try:
            os.close(os.open(self.folder / "immortal", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            made.register_step_post_hook(self.applied)
        return made

    def applied(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self.step = int(next(iter(optimizer.state.values()))["step"]) - 1
        self.telling = True
        self.perhaps_die("applied")

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.telling:
            # The next step has begun, so the previous one has been reported.
            self.telling = False
            self.perhaps_die("told")
        return super().loss(model, batch)

    def perhaps_die(self, when: str) -> None:
        if self.chance.random() < 0.025:
            (self.folder / f"died-{os.getpid()}").write_text(f"{when} {self.step}")
            os.kill(os.getpid(), signal.SIGKILL)


class Tabular(Faulty):
    """The same on data whose columns are numbers, as every format can hold them."""

    def collate(self, table: pa.Table) -> Any:
        batch = super().collate(table)
        return {"x": torch.stack([batch[f"x{number}"] for number in range(6)], dim=1).float(), "y": batch["y"]}


class Texts(Faulty):
    """The same on tokens: of texts, or packed."""

    def collate(self, table: pa.Table) -> Any:
        batch = pad(table)
        mask, ids = batch["attention_mask"], batch["input_ids"]
        x = torch.stack([((ids % 6 == number) * mask).sum(1) for number in range(6)], dim=1).float()
        if "position_ids" in batch:
            x[:, 5] += (batch["position_ids"] == 0).sum(1)
        return {"x": x, "y": (ids * mask).sum(1) % 3}


class Pictures(Faulty):
    """The same on images and their classes, of a folder or of tar files."""

    def collate(self, table: pa.Table) -> Any:
        batch = super().collate(table)
        pixels = batch["image"].float().flatten(2)
        labels = batch["label"] if "label" in batch else batch["cls"]
        return {"x": torch.cat([pixels.mean(2), pixels.std(2)], dim=1) / 64, "y": labels}


class Frozen(Faulty):
    """The same with first layers that are not trained."""

    def parts(self) -> dict[str, Any]:
        parts = super().parts()
        frozen = {name: lambda build=parts[name]: build().requires_grad_(False) for name in ("first", "norm")}
        return {**parts, **frozen}


class Hears(Faulty):
    """The same, which writes down what it hears of its run, and fails at evaluations."""

    def on_step(self, metrics: dict[str, Any]) -> None:
        self.note("step", metrics["step"], metrics["loss"])

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        self.note("evaluation", step, metrics["loss"])
        raise ValueError("no room for this evaluation")

    def on_checkpoint(self, step: int, path: str) -> None:
        self.note("checkpoint", step, bool(os.listdir(path)))

    def note(self, *what: Any) -> None:
        with (self.folder / "heard").open("a") as file:
            file.write(json.dumps([os.getpid(), *what]) + "\n")


class Peaks(Faulty):
    """The same with a held-out `distance`, which is least after 35 steps."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        self.made = super().optimizer(parameters)
        return self.made

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        return {"distance": abs(self.applied() - 35.0), "loss": loss}

    def applied(self) -> int:
        return max((int(state["step"]) for state in self.made.state.values()), default=0)


class DiesEvaluating(Peaks):
    """The same; one process dies in the evaluation after `at` steps."""

    def __init__(self, folder: str, at: int, pad_s: float = 0.0) -> None:
        super().__init__(folder, pad_s=pad_s)
        self.at = at

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        if self.applied() == self.at:
            with contextlib.suppress(FileExistsError):
                (self.folder / "died").open("x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(model, batch)


class Gated(Peaks):
    """The same, which waits before each of some steps for a file `gate-STEP`."""

    def __init__(self, folder: str, gates: Sequence[int]) -> None:
        super().__init__(folder)
        self.gates = gates

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        while self.applied() in self.gates and not (self.folder / f"gate-{self.applied()}").exists():
            time.sleep(0.01)
        return super().loss(model, batch)


class Begun(Faulty):
    """Faulty, with initial values from a file; with `itself`, its `model` reads them."""

    def __init__(self, folder: str, itself: bool = False, **others: Any) -> None:
        super().__init__(folder, **others)
        self.named, self.itself = not itself, itself
        self.file = Path(folder) / "base.safetensors"

    def model(self) -> nn.Module:
        model = nn.Sequential(OrderedDict((name, build()) for name, build in self.parts().items()))
        if torch.get_default_device().type != "meta":
            model.load_state_dict(load_file(self.file))
        return model

    def weights(self) -> WeightFiles | None:
        return None if self.itself else WeightFiles(self.file)


class Rebuilt(Begun):
    """The same with frozen layers below the last one, which a run does not save unless they are to be `saved`."""

    def __init__(self, folder: str, saved: bool = False, **others: Any) -> None:
        super().__init__(folder, **others)
        self.saved = saved

    def parts(self) -> dict[str, Any]:
        def frozen(build: Any) -> Any:
            return lambda: build().requires_grad_(False)

        *first, (last, build) = super().parts().items()
        return {**{name: frozen(one) for name, one in first}, last: build}

    def rebuilt(self) -> list[str]:
        return [] if self.saved else ["*"]


class NextToken(Task):
    """Predict the next of twenty tokens from the one before."""

    def layers(self) -> dict[str, Any]:
        return {"all": lambda: nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=0.05)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten())
