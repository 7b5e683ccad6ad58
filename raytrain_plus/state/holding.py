"""A worker's training state: everything that a step changes, as named tensors and a JSON tree.

Names: `param/<name>`, `buffer/<name>` (non-persistent buffers too), `optim/<parameter>/<key>`, `ema/<name>`, and for
tensors among settings `group/...` and `scheduler/...`; in the hash also `scale/loss`. A frozen weight that each worker
builds by itself has only a digest, `rebuilt/<name>`. Tied parameters appear once. If
the optimizer's state is sharded, what belongs to rows of weights has keys with the rows beside the name: see
`weight_rows`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from raytrain_plus.device_copies import StateCopies
from raytrain_plus.errors import TaskError
from raytrain_plus.membership.pieces import Piece
from raytrain_plus.state.entry import REBUILT, Cut
from raytrain_plus.state.json_tree import Json, from_json, to_json
from raytrain_plus.state.weight_rows import TensorKey, key_of, name_of

SKIPPED = "skipped"
"""A key of `Holding.counts`: the consecutive steps, up to the state's own, skipped because sums were not finite."""

METRICS = "metrics"
"""A key of `Holding.counts`, if there are any: the most metrics that the loss has returned in a step so far."""

LOSS_SCALE, LOSS_SCALE_STEPS = "loss scale", "loss scale steps"
"""Keys of `Holding.counts`, if losses are scaled: the exponent of the scale, a power of 2, and its number of steps."""

AVERAGED = "averaged"
"""A key of `Holding.counts`, if weights are averaged: 1 once a step has been made."""

LEFT_ALONE = "left alone"
"""A key of `Holding.rules`: a parameter without a gradient keeps its value, as in PyTorch.

False in the states of older versions, in which it got a gradient of zeros: their runs end as they began.
"""


WEIGHTED = "weighted evaluation"
"""A key of `Holding.rules`: the default evaluation counts each batch with the weight that the task's loss returns.

False in the states of older versions, in which it counted the rows.
"""


AS_BUILT = "modes as built"
"""A key of `Holding.rules`: modules that were built in evaluation mode, such as a frozen batch norm, stay in it.

False in the states of older versions, in which all modules were put into training mode.
"""


NOTHING_ADDED = "nothing added"
"""A key of `Holding.rules`: a forward pass that adds state to the model is refused: see `training.model.added_state`.

False in the states of older versions, which did not notice it.
"""

MEAN_LOSS = "mean loss"
"""A key of `Holding.rules`: the mean loss of each microbatch is backpropagated, and its gradients are weighted later.

False in the states of older versions, which backpropagated the loss times its weight, as hooks then saw it.
"""

RULES = (LEFT_ALONE, WEIGHTED, AS_BUILT, NOTHING_ADDED, MEAN_LOSS)
"""The keys of `Holding.rules`."""
NEW_RULES: Mapping[str, bool] = MappingProxyType(dict.fromkeys(RULES, True))
"""Those of a run that this version begins."""


def rules_of(tree: Json) -> dict[str, bool]:
    """Return the rules of a state, which an older version may have written."""
    found: dict[str, bool] = dict.fromkeys(RULES, False) | tree.get("rules", {})
    return found


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Which rows of weights a worker changes, if the optimizer's state is sharded."""

    rows: Sequence[Piece]
    """For each of the optimizer's parameters, the rows of a weight that it is; of some weights there are none."""
    counts: Mapping[str, int]
    """How many rows each weight has; one if it is not divided."""
    whole: Sequence[tuple[str, nn.Parameter]]
    """The weights whose values are the same on all workers."""

    @property
    def divided(self) -> set[str]:
        """The tensors of the weights that are the same on all workers; each worker writes rows of them, too."""
        return {f"param/{name}" for name, _ in self.whole}


@dataclass(frozen=True, slots=True)
class Holding:
    """The live training state."""

    buffers: Mapping[str, torch.Tensor]
    """The committed buffers."""
    parameters: Sequence[tuple[str, nn.Parameter]]
    """The trained parameters; if the optimizer's state is sharded, rows of them, under the names of their weights."""
    frozen: Sequence[tuple[str, nn.Parameter]]
    """The parameters that are not trained, without those that each worker builds by itself."""
    optimizer: torch.optim.Optimizer | None
    """None if nothing is trained."""
    scheduler: Any
    scales: dict[str, int]
    """The grids of the next exact sums; empty if sums are not exact."""
    persistent: Sequence[str] = ()
    """The buffers in the model's `state_dict`."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts over steps that belong to the state: see `SKIPPED`, `METRICS` and `LOSS_SCALE`."""
    allowed: frozenset[str] = frozenset()
    """Tensors that may hold NaN or infinity, because they did when the run began."""
    rules: dict[str, bool] = field(default_factory=dict)
    """Rules of the run's steps that older versions did not have: see `LEFT_ALONE`."""
    averages: Sequence[tuple[str, torch.Tensor]] = ()
    """The averages of the trained parameters, if the job has any."""
    layout: RowLayout | None = None
    """None if the optimizer's state is not sharded."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """How the modules are cut that have slices, by their names in the model that is not cut."""
    copies: StateCopies = field(default_factory=lambda: StateCopies(torch.device("cpu")))
    """They must end before the state changes."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Further names in the model's `state_dict` of tensors that have several -> their names in the state, without the
    kind; both as in the model that is not cut."""
    remembered: dict[str, Any] = field(default_factory=dict)
    """What the task remembers of the steps so far: see `training.exchange.stepwise`."""

    rebuilt: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The digests of the others, by the parameters' names: 32 bytes each."""

    @property
    def rows(self) -> Iterable[Piece | None]:
        """For each of the optimizer's parameters, the rows of a weight that it is; None for each if it is a weight."""
        return itertools.repeat(None) if self.layout is None else self.layout.rows


def model_state(holding: Holding, *, with_values: bool = False) -> dict[TensorKey, torch.Tensor]:
    """Return parameters, or their digests, their averages and buffers: the state that exists before any step.

    `with_values`: also the rows held here of weights that are the same on all workers, beside these weights.
    """
    shared = () if holding.layout is None else holding.layout.whole
    whole = set[str]() if with_values else {f"param/{name}" for name, _ in shared}
    trained = _by_rows(holding, "param", holding.parameters)
    tensors = {key: value for key, value in trained.items() if name_of(key) not in whole}
    tensors |= {f"param/{name}": value.detach() for name, value in (*shared, *holding.frozen)}
    tensors |= {f"{REBUILT}{name}": digest for name, digest in holding.rebuilt.items()}
    tensors |= _by_rows(holding, "ema", holding.averages)
    return tensors | {f"buffer/{name}": value.detach() for name, value in holding.buffers.items()}


def _by_rows(holding: Holding, kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> dict[TensorKey, torch.Tensor]:
    """Return values of the parameters by their keys, without those that are no rows of their weight."""
    return {
        key_of(rows, f"{kind}/{name}"): value.detach()
        for rows, (name, value) in zip(holding.rows, named, strict=False)
        if rows is None or rows.first < rows.last
    }


def optimized(holding: Holding) -> Iterator[tuple[Piece | None, str, dict[str, Any]]]:
    """Yield the optimizer's state of each parameter, with the rows that it is, if any, and its weight."""
    known = {id(value): (rows, name) for rows, (name, value) in zip(holding.rows, holding.parameters, strict=False)}
    for parameter, state in holding.optimizer.state.items() if holding.optimizer is not None else ():
        yield *known[id(parameter)], state


def listed_weights(holding: Holding) -> dict[str, bool]:
    """Return the names of the parameters that are saved, and whether the optimizer has a state of each."""
    stateful = {name for _, name, state in optimized(holding) if state}
    listed = [name for name, _ in (holding.parameters if holding.layout is None else holding.layout.whole)]
    listed += [rows.name for rows in (() if holding.layout is None else holding.layout.rows) if rows.first < rows.last]
    return {name: name in stateful for name in (*listed, *(name for name, _ in holding.frozen))}


def saved_model(holding: Holding) -> dict[TensorKey, torch.Tensor]:
    """Return the tensors of the model's `state_dict`, with the values of rows. Also valid while a step computes."""
    unsaved = {f"buffer/{name}" for name in holding.buffers.keys() - set(holding.persistent)}
    return {key: value for key, value in model_state(holding, with_values=True).items() if key not in unsaved}


def scale_values(counts: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the scale of the loss as named numbers; empty if losses are not scaled."""
    if LOSS_SCALE not in counts:
        return {}
    values = {"scale/loss": math.ldexp(1.0, counts[LOSS_SCALE]), "scale/loss_steps": float(counts[LOSS_SCALE_STEPS])}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def describe_state(holding: Holding, *, with_values: bool = False) -> tuple[dict[TensorKey, torch.Tensor], Json]:
    """Return the state as live tensors and a JSON tree; `with_values`: see `model_state`.

    Raises `TaskError` for values that JSON cannot hold.
    """
    tensors, others = model_state(holding, with_values=with_values), dict[str, torch.Tensor]()
    rest = {
        "scales": dict(holding.scales),
        "counts": dict(holding.counts),
        "rules": dict(holding.rules),
        "persistent": list(holding.persistent),
        "allowed": sorted(holding.allowed),
        **({"cuts": {name: list(cut) for name, cut in holding.cuts.items()}} if holding.cuts else {}),
        **({"shared": dict(holding.shared)} if holding.shared else {}),
        **({"remembered": dict(holding.remembered)} if holding.remembered else {}),
    }
    if holding.optimizer is None:
        return tensors, {"classes": None, "optimizer": {}, "groups": None, "scheduler": None, **rest}
    names = {id(value): name for name, value in holding.parameters}
    optimizer = {}
    for rows, name, state in optimized(holding):
        own: dict[str, torch.Tensor] = {}
        optimizer[name] = to_json(dict(state), f"optim/{name}", own)
        tensors |= {key_of(rows, tensor): value for tensor, value in own.items()}
    groups = [
        {
            "parameters": _weights(group, names),
            "settings": to_json({k: v for k, v in group.items() if k != "params"}, f"group/{number}", others),
        }
        for number, group in enumerate(holding.optimizer.param_groups)
    ]
    scheduler = None
    if holding.scheduler is not None:
        scheduler = to_json(holding.scheduler.state_dict(), "scheduler", others)
    return tensors | others, {
        "classes": _classes(holding),
        "optimizer": optimizer,
        "groups": groups,
        "scheduler": scheduler,
        **rest,
    }


def _classes(holding: Holding) -> dict[str, str | None]:
    """Return the class names of optimizer and scheduler, without their modules, which may move."""
    scheduler = None if holding.scheduler is None else type(holding.scheduler).__qualname__
    return {"optimizer": type(holding.optimizer).__qualname__, "scheduler": scheduler}


def _weights(group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    """Return the weights of an optimizer's group; its parameters may be rows of them."""
    return list(dict.fromkeys(names[id(parameter)] for parameter in group["params"] if id(parameter) in names))


def class_differences(tree: Json, holding: Holding) -> list[str]:
    """Describe how the classes of the task's optimizer and scheduler differ from those of a state.

    One class may silently accept the state of another and continue differently.
    """
    if holding.optimizer is None or tree.get("classes") is None:
        return []
    here, there = _classes(holding), tree["classes"]
    return [
        f"the {what} is {there[what] or 'none'} in the checkpoint, {here[what] or 'none'} in the task"
        for what in here
        if what in there and here[what] != there[what]
    ]


def settings_kept(tree: Json, holding: Holding) -> list[str]:
    """Describe how settings of the optimizer's groups, as the task makes them, differ from those of a state.

    Loading the state keeps its own. Where a scheduler changes the learning rate, the first one is compared.
    """
    if holding.optimizer is None:
        return []
    found = []
    groups = list(zip(holding.optimizer.param_groups, tree["groups"], strict=False))
    for number, (group, held) in enumerate(groups):
        there = held["settings"]
        changing = {"params", "lr"} if "initial_lr" in there else {"params"}
        if "max_momentum" in there:
            changing |= {"momentum", "betas"}
        here = {key: value for key, value in group.items() if key in there and key not in changing}
        for key, value in here.items():
            made = to_json(value, "", {})
            if made != there[key] and isinstance(made, (int, float)) and isinstance(there[key], (int, float)):
                where = f" (group {number + 1} of {len(groups)})" if len(groups) > 1 else ""
                found.append(f"{'lr' if key == 'initial_lr' else key} {there[key]:g}, not {made:g}{where}")
    return found


def load_tree(tree: Json, holding: Holding, tensor: Callable[[TensorKey, torch.device], torch.Tensor]) -> None:
    """Load optimizer, scheduler and grids from a tree; `tensor(key, device)` returns the tensors.

    Raises `TaskError` if optimizer or scheduler are of other classes or have other groups, before changing anything.
    """
    if holding.optimizer is None:
        _put_rest(tree, holding)
        return
    others = class_differences(tree, holding)
    if others:
        raise TaskError(f"the task does not match the state to load: {'; '.join(others)}")
    names = {id(value): name for name, value in holding.parameters}
    mine = [set(_weights(group, names)) for group in holding.optimizer.param_groups]
    if mine != [set(group["parameters"]) for group in tree["groups"]]:
        raise TaskError(
            "the optimizer has other parameter groups than the state to load: "
            f"{len(mine)} here, {len(tree['groups'])} there"
        )
    any_device = holding.parameters[0][1].device

    def at(device: torch.device, rows: Piece | None = None) -> Callable[[str, bool], torch.Tensor]:
        # A step count stays on the CPU if the optimizer keeps it there.
        return lambda name, on_cpu: tensor(key_of(rows, name), torch.device("cpu") if on_cpu else device)

    of_weight: dict[str, list[tuple[nn.Parameter, Piece | None]]] = {}
    for rows, (name, value) in zip(holding.rows, holding.parameters, strict=False):
        of_weight.setdefault(name, []).append((value, rows))
    holding.optimizer.state.clear()
    for name, state in tree["optimizer"].items():
        for value, rows in of_weight[name]:
            if rows is None or rows.first < rows.last:
                holding.optimizer.state[value] = from_json(state, at(value.device, rows))
    for group, held in zip(holding.optimizer.param_groups, tree["groups"], strict=True):
        group.update(from_json(held["settings"], at(any_device)))
    if holding.scheduler is not None:
        holding.scheduler.load_state_dict(from_json(tree["scheduler"], at(any_device)))
    _put_rest(tree, holding)


def _put_rest(tree: Json, holding: Holding) -> None:
    holding.scales.clear()
    holding.scales.update(tree["scales"])
    # States of older versions have no counts.
    holding.counts.clear()
    holding.counts.update({SKIPPED: 0} | tree.get("counts", {}))
    holding.rules.update(rules_of(tree))
    holding.remembered.clear()
    holding.remembered.update(tree.get("remembered", {}))
