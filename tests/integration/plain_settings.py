"""Thirty settings of a user's own: modules, losses and optimizers, as people write them for a loop of their own.

`LOOPS` has them by name. `Beside` is a task of one; `tests/unit/training/test_plain_loops.py` has the plain loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task, schedules

Batch = Mapping[str, torch.Tensor]
Named = Sequence[tuple[str, nn.Parameter]]


class Bounded(torch.autograd.Function):
    """Passes values, and no gradient beyond a limit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clamp(-0.01, 0.01)


class Reverse(torch.autograd.Function):
    """Passes values, and gradients of the other sign, divided by their norm, as in domain adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -0.1 * gradients[0] / (gradients[0].norm() + 1e-3)


class Net(nn.Module):
    """Two layers, with `inner` between them; the second one makes `outputs` numbers of a row."""

    def __init__(self, inner: nn.Module | None = None, outputs: int = 3) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 16), inner or nn.Identity()
        self.last = nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.inner(torch.tanh(self.first(x))))
        return found


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def hooked(hook: Callable[[torch.Tensor], torch.Tensor], *names: str) -> nn.Module:
    """Return a net whose parameters of these names have the hook; all without names."""
    net = Net()
    for name, value in net.named_parameters():
        if not names or name in names:
            value.register_hook(hook)
    return net


def module_hook(net: nn.Module) -> nn.Module:
    """Clamp what goes back from the last layer to those before it."""
    net.last.register_full_backward_hook(lambda _, given, __: tuple(one.clamp(-0.01, 0.01) for one in given))  # type: ignore[operator, union-attr]
    return net


def hook_before(net: nn.Module) -> nn.Module:
    """Clamp what comes to the last layer from the loss."""
    net.last.register_full_backward_pre_hook(lambda _, given: tuple(one.clamp(-0.02, 0.02) for one in given))  # type: ignore[operator, union-attr]
    return net


def hook_of_outputs() -> nn.Module:
    """Clamp the gradient of a tensor in the middle."""

    def clamped(x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return x

    return Net(Call(clamped))


def frozen(*names: str) -> nn.Module:
    """Return a net whose parameters of these names are frozen."""
    net = Net(nn.Linear(16, 16))
    for name, value in net.named_parameters():
        value.requires_grad_(not name.startswith(names))
    return net


class Encoded(nn.Module):
    """A head on a frozen encoder in evaluation mode: with dropout, and batch norms with statistics of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)).requires_grad_(False).eval()
        self.encoder[1].running_mean.fill_(0.3)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen = self.encoder(x)
        found: torch.Tensor = self.head(seen)
        return found


class FrozenNorm(nn.Module):
    """A batch norm in evaluation mode whose weights are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16).eval(), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return found


class Tied(nn.Module):
    """One matrix for both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.last = nn.Linear(6, 16), nn.Linear(16, 6, bias=False), nn.Linear(6, 3)
        self.back.weight = nn.Parameter(torch.empty(6, 16))
        self.again = nn.Linear(6, 16)
        self.again.weight = self.there.weight
        nn.init.normal_(self.back.weight, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.back(torch.tanh(self.again(self.back(torch.tanh(self.there(x)))))))
        return found


class Unused(Net):
    """Has a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)


class Configured(Net):
    """Makes its optimizer itself, as nanoGPT and Lightning modules do."""

    def configure_optimizers(self, named: Named) -> torch.optim.Optimizer:
        kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for _, value in named:
            kinds[value.dim() > 1].append(value)
        groups = [{"params": kinds[True], "weight_decay": 0.1}, {"params": kinds[False], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)


class Uncertain(nn.Module):
    """Learns how much each of two losses counts."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scales = Net(outputs=4), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found


class Recurrent(nn.Module):
    """Six steps of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(1, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.cell(x[..., None])[0][:, -1])
        return found


class Tokens(nn.Module):
    """Scores for each of six tokens, of which 0 fills up rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.last = nn.Embedding(8, 16, padding_idx=0), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.mix(self.embed(tokens))))
        return found


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                mean = state.setdefault("mean", torch.zeros_like(value))
                # A sign would turn rounding errors into whole steps.
                value.sub_(torch.tanh(30 * torch.lerp(value.grad, mean, 0.9)), alpha=group["lr"])
                mean.lerp_(value.grad, 0.01)


def tokens_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of rows of one to six tokens, as many as the label says; the rest is filled up."""
    tokens = (batch["x"] * 2).round().long().clamp(1, 7)
    length = 2 * batch["y"] + 1
    there = torch.arange(6) < length[:, None]
    return torch.where(there, tokens, 0), torch.where(there, tokens.roll(-1, 1), -100)


def scored(model: nn.Module, batch: Batch) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def strong(model: nn.Module, batch: Batch) -> Any:
    return 30 * scored(model, batch)


def by_tokens(model: nn.Module, batch: Batch) -> Any:
    tokens, labels = tokens_of(batch)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
    return {"loss": loss, "weight": int((labels != -100).sum())}


def by_tokens_on_device(model: nn.Module, batch: Batch) -> Any:
    found = by_tokens(model, batch)
    return {**found, "weight": torch.tensor(found["weight"])}


def of_some_rows(model: nn.Module, batch: Batch) -> Any:
    """Score the rows of the last class alone: a microbatch may have none, and then its mean is NaN."""
    labels = torch.where(batch["y"] == 2, batch["y"], -100)
    return {"loss": F.cross_entropy(model(batch["x"]), labels), "weight": float((labels == 2).sum())}


def of_two_tasks(model: Any, batch: Batch) -> Any:
    found = model(batch["x"])
    losses = torch.stack([F.cross_entropy(found[:, :3], batch["y"]), F.mse_loss(found[:, 3], batch["x"].sum(1))])
    return {"loss": ((-model.scales).exp() * losses + model.scales).sum(), "metrics": {"second": losses[1]}}


def with_penalty(model: nn.Module, batch: Batch) -> Any:
    """A penalty on the gradient of the inputs, by a backward pass of its own."""
    x = batch["x"].clone().requires_grad_()
    loss = F.cross_entropy(model(x), batch["y"])
    if not torch.is_grad_enabled():
        return loss
    [slope] = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 10 * slope.square().sum()


def sgd(named: Named, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([value for _, value in named], lr=0.1, momentum=0.9)


def of_torch(kind: Any, **settings: Any) -> Callable[[Named, nn.Module], torch.optim.Optimizer]:
    def made(named: Named, model: nn.Module) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = kind([value for _, value in named], **settings)
        return found

    return made


def in_groups(named: Named, model: nn.Module) -> torch.optim.Optimizer:
    last = [value for name, value in named if name.startswith("last")]
    rest = [value for name, value in named if not name.startswith("last")]
    return torch.optim.SGD([{"params": last, "lr": 0.2}, {"params": rest}], lr=0.05, momentum=0.5, nesterov=True)


def by_types(named: Named, model: nn.Module) -> torch.optim.Optimizer:
    biases = {id(one.bias) for one in model.modules() if isinstance(one, nn.Linear)}
    groups = [
        {"params": [value for _, value in named if (id(value) in biases) == bias], "weight_decay": 0.0 if bias else 0.1}
        for bias in (False, True)
    ]
    return torch.optim.SGD(groups, lr=0.1)


@dataclass(frozen=True, slots=True)
class Loop:
    """A setting."""

    model: Callable[[], nn.Module] = Net
    loss: Callable[[Any, Batch], Any] = scored
    optimizer: Callable[[Named, Any], torch.optim.Optimizer] = sgd
    scheduler: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None
    microbatches: int = 1
    clip_value: float | None = None
    clip_norm: float | None = None


LOOPS: dict[str, Loop] = {
    "a net": Loop(),
    "clamped gradients": Loop(lambda: hooked(lambda one: one.clamp(-0.05, 0.05)), strong),
    "normed gradients": Loop(lambda: hooked(lambda one: one / (one.norm() + 0.1)), strong),
    "one clamped gradient": Loop(lambda: hooked(lambda one: one.clamp(-0.01, 0.01), "first.weight"), microbatches=2),
    "a hook of a module": Loop(lambda: module_hook(Net()), strong),
    "a hook before a module": Loop(lambda: hook_before(Net()), strong, microbatches=3),
    "a hook of outputs": Loop(hook_of_outputs, strong),
    "a bounded backward pass": Loop(lambda: Net(Call(Bounded.apply)), strong),
    "a reversed backward pass": Loop(lambda: Net(Call(Reverse.apply)), strong, microbatches=2),
    "a penalty on slopes": Loop(loss=with_penalty),
    "a frozen first layer": Loop(lambda: frozen("first")),
    "frozen biases": Loop(lambda: frozen("first.bias", "inner.bias"), optimizer=of_torch(torch.optim.AdamW, lr=1e-2)),
    "a frozen encoder": Loop(Encoded, microbatches=2),
    "a frozen batch norm": Loop(FrozenNorm),
    "tied weights": Loop(Tied),
    "an unused layer": Loop(Unused, optimizer=of_torch(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)),
    "an optimizer of the model's": Loop(Configured, optimizer=lambda named, model: model.configure_optimizers(named)),
    "groups by types": Loop(optimizer=by_types, clip_norm=0.1),
    "groups by names": Loop(optimizer=in_groups),
    "an optimizer of their own": Loop(optimizer=of_torch(Lion, lr=1e-2)),
    "amsgrad": Loop(optimizer=of_torch(torch.optim.AdamW, lr=1e-2, amsgrad=True), microbatches=3),
    "adagrad": Loop(optimizer=of_torch(torch.optim.Adagrad, lr=0.05)),
    "a warm start": Loop(scheduler=lambda one: schedules.warmup_cosine(one, 8, warmup=0.3), clip_norm=0.5),
    "clamped means": Loop(loss=strong, clip_value=0.02, clip_norm=0.3, microbatches=2),
    "a recurrent net": Loop(Recurrent, clip_norm=1.0),
    "layer norms": Loop(lambda: Net(nn.LayerNorm(16)), microbatches=6),
    "tokens": Loop(Tokens, by_tokens),
    "tokens in microbatches": Loop(Tokens, by_tokens, microbatches=3),
    "tokens counted on a device": Loop(Tokens, by_tokens_on_device, microbatches=2),
    "labels of some rows": Loop(loss=of_some_rows, microbatches=6),
    "weights of losses": Loop(Uncertain, of_two_tasks),
}


class Beside(Task):
    """A task of one setting; `pad_s`: seconds that each loss takes longer."""

    def __init__(self, setting: str, pad_s: float = 0.0) -> None:
        self.loop, self.pad_s = LOOPS[setting], pad_s

    def model(self) -> nn.Module:
        return self.loop.model()

    def optimizer(self, parameters: Any, model: Any) -> torch.optim.Optimizer:
        return self.loop.optimizer(list(parameters), model)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.loop.scheduler(optimizer)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if torch.is_grad_enabled():
            time.sleep(self.pad_s)
        return self.loop.loss(model, batch)
