"""Build a task's model under its random keys, with its layer names and on its device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from raytrain_plus.errors import TaskError
from raytrain_plus.generators import set_random_key
from raytrain_plus.membership.slice_names import MARK, whole_weight
from raytrain_plus.parallel.tensor.slicing import CutLayers, Slicing, cut_layers, tied_slices
from raytrain_plus.task import Task
from raytrain_plus.training.model.added_state import plain_tensors
from raytrain_plus.training.model.given_weights import GivenWeights, given_weights
from raytrain_plus.training.model.randomness import random_key
from raytrain_plus.training.model.rebuilt import patterns_of, rebuilt_weights

WHOLE = ("",)
"""The names of what can be run of a model that has no layers."""


def as_one(modules: Sequence[nn.Module]) -> nn.Module:
    """Return parts of a model as one module, whose parameters have the names that they have in the model."""
    if len(modules) == 1:
        return modules[0]
    return nn.Sequential(OrderedDict(pair for module in modules for pair in module.named_children()))


@dataclass(frozen=True, slots=True)
class Built:
    """A model, or a sequence of its layers."""

    module: nn.Module
    layers: tuple[str, ...]
    """Layer names in order; empty if the task does not declare them."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """For the whole model: name of a parameter that is a copy -> name of the parameter it copies."""
    woken: bool = False
    """Whether it, or one of its layers, was built in evaluation mode throughout, and is trained in training mode."""
    rebuilt: Mapping[str, str] = field(default_factory=dict)
    """The digests of the frozen weights that are not saved, by the weights' names in the model that is not cut."""


def build_model(task: Task, seed: int, device: torch.device, slicing: Slicing | None = None) -> Built:
    """Build the task's model on `device`, each layer under the key (seed, 'init', layer name).

    A task that does not declare its layers is built whole under the empty layer name; the modules of a plain
    `nn.Sequential` become its layers. Values are drawn on the CPU, so they do not depend on the device; those that
    `Task.weights` has in files take their place. `slicing`: the layers are cut into slices, which have the values of
    the whole model. Raises `TaskError` if the result is not a module, and if a plan of slices, or files, do not fit it.
    """
    if slicing is not None:
        [built] = build_chunks(task, seed, device, [layer_names(task, seed, in_one=True)], slicing)
        return built
    return _build_whole(task, seed, device, given_weights(task))


def model_to_load(task: Task, seed: int) -> nn.Module:
    """Build the task's whole model on the CPU for the values of a run.

    Those that the task has in files are not read, unless a run saves only some of them. Raises `TaskError` if the
    result is not a module.
    """
    given = given_weights(task) if patterns_of(task) else None
    return _build_whole(task, seed, torch.device("cpu"), given).module


def _build_whole(task: Task, seed: int, device: torch.device, given: GivenWeights | None) -> Built:
    layers = task.layers()
    if layers is not None:
        [built] = _built(task, layers, [tuple(layers)], seed, device, given)
        return built
    module = _whole(task, seed, given)
    woken = _wake(module)
    children = _children(module)
    tied = _untied(children)
    rebuilt = rebuilt_weights(task, module.named_parameters())
    return Built(module.to(device), tuple(children), tied, woken, rebuilt)


def build_chunks(
    task: Task,
    seed: int,
    device: torch.device,
    chunks: Sequence[Sequence[str]],
    slicing: Slicing | None = None,
) -> tuple[Built, ...]:
    """Build only these sequences of the model's layers, by name; the values are those of the whole model.

    `slicing`: see `build_model`. Raises `TaskError` if the task does not declare its layers; with slices, a model of
    other modules is built as one sequence of them.
    """
    layers = task.layers()
    if layers is not None:
        return _built(task, layers, chunks, seed, device, given_weights(task), slicing)
    module = _whole(task, seed, given_weights(task))
    woken = _wake(module)
    children = _children(module)
    if not children and slicing is not None and len(chunks) == 1:
        rebuilt = rebuilt_weights(task, module.named_parameters())
        return (replace(_cut_whole(module, slicing, device), woken=woken, rebuilt=rebuilt),)
    if not children:
        raise _no_layers()
    tied = _untied(children)
    _check_apart(children)
    found = []
    for names, rebuilt in [(names, _rebuilt(task, names, children)) for names in chunks]:
        part = _sequence(names, children, slicing)
        found.append(Built(part.to(device), tuple(names), _sliced(tied, slicing, part), woken, rebuilt))
    return tuple(found)


def build_layers(
    task: Task,
    seed: int,
    device: torch.device,
    slicing: Slicing | None = None,
    names: tuple[str, ...] | None = None,
) -> Iterator[Built]:
    """Yield each of the model's layers by itself, with the values of the whole model.

    If the task declares its layers, one after the other is built. `slicing`: see `build_model`. Raises `TaskError` if
    the task does not declare its layers, and `model()` returns no sequence of them either. `names`: those of
    `pass_names`, if they are known; a model that has no layers is yielded whole.
    """
    names = layer_names(task, seed) if names is None else names
    if names == WHOLE:
        yield build_model(task, seed, device, slicing)
    elif task.layers() is None:
        yield from build_chunks(task, seed, device, [(name,) for name in names], slicing)
    else:
        for name in names:
            yield build_chunks(task, seed, device, [(name,)], slicing)[0]


def pass_names(task: Task, seed: int, *, in_one: bool = False) -> tuple[str, ...]:
    """Return the names of what can be run one after the other: the layers, or `WHOLE` if there are none.

    Raises the errors of `layer_names`.
    """
    names, in_sequence = _layer_names(task, seed, in_one)
    return names if in_sequence else WHOLE


def layer_names(task: Task, seed: int, *, in_one: bool = False, setting: str = "parallel") -> tuple[str, ...]:
    """Return the names of the model's layers in order. Modules are built without values if possible.

    `in_one`: they stay in one stage, so that the modules of any model do. `setting`: what needs the layers, for errors.
    Raises `TaskError` if the task does not declare its layers, or if they cannot be separated.
    """
    return _layer_names(task, seed, in_one, setting)[0]


def _layer_names(task: Task, seed: int, in_one: bool, setting: str = "parallel") -> tuple[tuple[str, ...], bool]:
    """Return `layer_names`, and whether these are run one after the other; the modules of other models are not."""
    try:
        with torch.device("meta"):
            layers = task.layers()
            module = task.model() if layers is None else None
            children = (
                {name: build() for name, build in (layers or {}).items()}
                if module is None
                else _children(module, in_one)
            )
    except Exception:
        # For example, a model that reads its values from a file cannot be built on the meta device.
        layers = task.layers()
        if layers is not None:
            return tuple(layers) or _raise(_no_layers(setting)), True
        module = _whole(task, seed, None)
        return tuple(_children(module, in_one)) or _raise(_no_layers(setting)), bool(_children(module))
    if not children:
        raise _no_layers(setting)
    in_sequence = module is None or bool(_children(module))
    if layers is None:
        _untied(children)
    _check_apart(children)
    for name in children:
        for mark in ("/", MARK):
            if mark in name:
                raise TaskError(f"the layer '{name}' has a '{mark}' in its name", where="layers()", expected="none")
    return tuple(children), in_sequence


def model_without_values(task: Task) -> nn.Module | None:
    """Return the task's model, or the sequence of its layers, without values; None if it cannot be built so."""
    try:
        with torch.device("meta"):
            layers = task.layers()
            if layers is None:
                return task.model()
            return nn.Sequential(OrderedDict((name, build()) for name, build in layers.items()))
    except Exception:
        # For example, a model that reads its values from a file. The workers check the model that they build.
        return None


def parameters_of(task: Task) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the task's model, without values; none if it cannot be built without them."""
    model = model_without_values(task)
    return [] if model is None else list(model.named_parameters())


def _raise(error: Exception) -> NoReturn:
    raise error


def _no_layers(setting: str = "parallel") -> TaskError:
    return TaskError(
        "a model that does not declare its layers cannot be divided between them",
        where=setting,
        expected="Task.layers, or a Task.model that returns an nn.Sequential with each module in it once",
        remedy=f"define Task.layers in place of Task.model, as examples/gpt.py does, or leave out {setting}",
    )


def _built(
    task: Task,
    layers: Mapping[str, Callable[[], nn.Module]],
    chunks: Sequence[Sequence[str]],
    seed: int,
    device: torch.device,
    given: GivenWeights | None,
    slicing: Slicing | None = None,
) -> tuple[Built, ...]:
    tied = dict(task.tied())
    _check_tied(tied, layers)

    def layer(name: str, only: str | None = None) -> nn.Module:
        set_random_key(random_key(seed, "init", name))
        built = layers[name]()
        _check_module(built, f"layers()['{name}']")
        if given is not None:
            given.fill(built, name, tied, only)
        return built

    made = {name: layer(name) for names in chunks for name in names}
    asleep = not any(map(_trains, made.values())) and not _any_trains(
        build for name, build in layers.items() if name not in made
    )
    for one in made.values() if asleep else ():
        one.train()
    for copy, owner in tied.items():
        (at, name), (owner_at, owner_name) = _place(copy), _place(owner)
        if at in made:
            # If the owner is on another worker, its layer is built once more for its values.
            source = made[owner_at] if owner_at in made else layer(owner_at, owner)
            _copy(_parameter(source, owner_name, owner), _parameter(made[at], name, copy), copy, owner)
    built = []
    for names in chunks:
        rebuilt = _rebuilt(task, names, made)
        module = _sequence(names, made, slicing)
        if len(names) == len(layers):
            _check_module(module, "model()")
        built.append(Built(module.to(device), tuple(names), _sliced(tied, slicing, module), asleep, rebuilt))
    return tuple(built)


def _sequence(names: Sequence[str], layers: Mapping[str, nn.Module], slicing: Slicing | None) -> nn.Sequential:
    """Return these of the layers as a module, cut into slices if they are to be."""
    own = OrderedDict((name, layers[name]) for name in names)
    return nn.Sequential(own) if slicing is None else CutLayers(*cut_layers(own, slicing))


def _rebuilt(task: Task, names: Sequence[str], layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the digests of the frozen weights of these layers that are not saved."""
    own = ((f"{name}.{of}", value) for name in names for of, value in layers[name].named_parameters())
    return rebuilt_weights(task, own)


def _sliced(tied: Mapping[str, str], slicing: Slicing | None, module: nn.Module) -> Mapping[str, str]:
    """Return which parameters are tied to which, by the names of their slices if they are cut."""
    return tied if slicing is None else tied_slices(tied, slicing, module)


def _place(name: str) -> tuple[str, str]:
    """Return a parameter's layer, and its name in that layer."""
    layer, _, rest = name.partition(".")
    return layer, rest


def _check_tied(tied: Mapping[str, str], layers: Collection[str]) -> None:
    for copy, owner in tied.items():
        for name in (copy, owner):
            if _place(name)[0] not in layers:
                raise _not_tied(copy, owner, f"there is no layer '{_place(name)[0]}'")
        if _place(copy)[0] == _place(owner)[0]:
            raise _not_tied(copy, owner, "both are in the same layer; share the parameter inside it")
        if owner in tied:
            raise _not_tied(copy, owner, f"'{owner}' is itself a copy of '{tied[owner]}'")


def _parameter(layer: nn.Module, name: str, whole: str) -> nn.Parameter:
    try:
        return layer.get_parameter(name)
    except AttributeError:
        raise TaskError(f"tied() names '{whole}', but its layer has no such parameter", where="Task.tied") from None


def _copy(source: nn.Parameter, target: nn.Parameter, copy: str, owner: str) -> None:
    if (source.shape, source.dtype, source.requires_grad) != (target.shape, target.dtype, target.requires_grad):
        raise _not_tied(copy, owner, "they differ in shape, dtype or requires_grad")
    with torch.no_grad():
        target.copy_(source)


def _not_tied(copy: str, owner: str, why: str) -> TaskError:
    return TaskError(f"'{copy}' cannot be tied to '{owner}': {why}", where="Task.tied")


def _untied(children: Mapping[str, nn.Module]) -> dict[str, str]:
    """Give each layer its own copy of a parameter that several layers share; return copy -> owner."""
    owners: dict[int, tuple[str, str]] = {}
    tied: dict[str, str] = {}
    for layer, child in children.items():
        copies: dict[int, nn.Parameter] = {}
        for name, value in list(child.named_parameters(remove_duplicate=False)):
            first, owner = owners.setdefault(id(value), (layer, f"{layer}.{name}"))
            if first == layer:
                continue
            if id(value) not in copies:
                copies[id(value)] = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
                tied[f"{layer}.{name}"] = owner
            path, _, attribute = name.rpartition(".")
            setattr(child.get_submodule(path), attribute, copies[id(value)])
    return tied


def other_names(module: nn.Module) -> dict[str, str]:
    """Return the further names in the `state_dict` of tensors that have several -> their first name.

    Both are those in the model that is not cut into slices.
    """
    saved = module.state_dict()
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(value), name)) for name, value in tensors if name in saved]
    return {whole_weight(name): whole_weight(owner) for name, owner in pairs if name != owner}


def _whole(task: Task, seed: int, given: GivenWeights | None) -> nn.Module:
    set_random_key(random_key(seed, "init", ""))
    module = task.model()
    _check_module(module, "model()")
    if given is not None:
        given.fill(module)
    return module


def _wake(module: nn.Module) -> bool:
    """Put a model into training mode if all of it is in evaluation mode, as `from_pretrained` returns it.

    Return whether it was.
    """
    asleep = not _trains(module)
    if asleep:
        module.train()
    return asleep


def _trains(module: nn.Module) -> bool:
    return any(one.training for one in module.modules())


def _any_trains(builders: Iterable[Callable[[], nn.Module]]) -> bool:
    """Return whether one of these layers is built with something in training mode; no values are made for it."""
    try:
        with torch.device("meta"):
            return any(_trains(build()) for build in builders)
    except Exception:
        # For example, a layer that reads its values from a file: the layers here are judged by themselves.
        return False


def modules_in_evaluation(module: nn.Module) -> list[nn.Module]:
    """Return the modules that are in evaluation mode."""
    return [one for one in module.modules() if not one.training]


def train_as_built(module: nn.Module) -> nn.Module:
    """Put a module that was just built into training mode, but for what of it was built in evaluation mode."""
    set_training(module, modules_in_evaluation(module))
    return module


def set_training(module: nn.Module, in_evaluation: Iterable[nn.Module]) -> None:
    """Put a module into training mode, but for these of its modules, such as a frozen batch norm."""
    module.train()
    for one in in_evaluation:
        one.training = False


def _check_apart(children: Mapping[str, nn.Module]) -> None:
    """Raise `TaskError` if two layers share a tensor: on two stages each would have its own."""
    owners: dict[int, str] = {}
    for name, child in children.items():
        for own, value in (*child.named_parameters(), *child.named_buffers()):
            other = owners.setdefault(id(value), name)
            if other != name:
                raise TaskError(
                    f"'{name}.{own}' is also a tensor of the layer '{other}', which can be elsewhere",
                    where="parallel",
                    expected="layers that share no tensors; declare tied parameters in Task.tied",
                )


def _children(module: nn.Module, in_one: bool = False) -> dict[str, nn.Module]:
    """Return the modules of a plain sequence by name; empty for other modules, or if a module occurs twice.

    `in_one`: those of any module. Raises `TaskError` for one that has tensors of its own beside them, or the same
    module twice, or runs all that is in it.
    """
    children = dict(module.named_children())
    if type(module) is nn.Sequential and len(children) == len(module):
        return children
    if not in_one:
        return {}
    every = [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]
    twice = next((name for name in every if name not in children), None)
    if twice is not None or isinstance(module, nn.Sequential):
        what = f"{type(module).__name__} is a sequence" if twice is None else f"'{twice}' is a module with another name"
        raise TaskError(
            f"{what}, so slices of its layers have no place in the model",
            where="parallel.tensor, parallel.experts",
            expected="layers(), a plain nn.Sequential, or another model() with each module in it once",
        )
    for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        raise TaskError(
            f"'{name}' belongs to the top-level module; slices need every tensor in a submodule",
            where="parallel.tensor, parallel.experts",
            expected="a model() all of whose parameters and buffers belong to modules, or layers()",
        )
    return children


def _cut_whole(module: nn.Module, slicing: Slicing, device: torch.device) -> Built:
    """Return a model that declares no layers, cut into slices: its modules take their place, and it has the slices."""
    children = _children(module, in_one=True)
    tied = _untied(children)
    layers, slices = cut_layers(children, slicing)
    for name, one in (*layers.items(), *slices.items()):
        module.add_module(name, one)
    return Built(module.to(device), (), _sliced(tied, slicing, module))


def _check_module(value: Any, source: str) -> None:
    if not isinstance(value, nn.Module):
        raise TaskError(f"{source} returned {type(value).__name__}", expected="a torch.nn.Module")
    if source == "model()" and not any(parameter.requires_grad for parameter in value.parameters()):
        raise no_parameter()
    for name, part in value.named_modules():
        _check_kind(part, f"{source}: '{name}'" if name else source)
    for where in plain_tensors(value):
        raise TaskError(
            f"{source}: '{where}' is a plain tensor, which is not copied to other workers",
            expected="only parameters and buffers",
            remedy=f"self.register_buffer('{where.rpartition('.')[2]}', ..., persistent=False)",
        )


def _check_kind(part: nn.Module, where: str) -> None:
    """Raise `TaskError` for a kind of module that cannot be trained here."""
    kind = type(part).__name__
    if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():
        raise TaskError(
            f"{where} is a {kind}, which has no shape before its first batch, so workers would not begin alike",
            expected="modules whose parameters have shapes when they are built",
            remedy=f"use nn.{kind.removeprefix('Lazy')} with the number of its inputs",
        )
    if isinstance(part, nn.SyncBatchNorm) and part.training:
        raise TaskError(
            f"{where} is a SyncBatchNorm, which would not synchronise: there is no process group of torch.distributed",
            expected="a batch norm that looks at the rows of a microbatch, or one in evaluation mode",
            remedy="use nn.BatchNorm1d, 2d or 3d, whose statistics are averaged over all shards after each step, or "
            "nn.GroupNorm",
        )


def no_parameter() -> TaskError:
    """Return the error that all parameters of the model are frozen."""
    return TaskError(
        "the model has no trainable parameter",
        where="model()",
        expected="at least one that requires a gradient",
        remedy="leave requires_grad of what is to be trained, such as the last layer, as it is",
    )
