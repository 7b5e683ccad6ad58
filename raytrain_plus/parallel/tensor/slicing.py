"""Cut a model's layers into slices, and keep the hosted ones; `state.slices` puts weights together again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from raytrain_plus.errors import TaskError
from raytrain_plus.membership.mesh import hosted_slices
from raytrain_plus.membership.slice_names import is_slice, slice_name, slice_of_weight
from raytrain_plus.parallel.tensor.expert_slices import ExpertSlices, StackedExperts
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.modules import Column, Leaf, Row, SharedInput, Vocabulary, part_of
from raytrain_plus.parallel.tensor.positions import DividedDropout, Entrance, Replicated
from raytrain_plus.parallel.tensor.slice_plan import DIVIDES, WHERE, Cut, SliceKind, cuts_of
from raytrain_plus.torch_compat import has_accumulated_hooks, has_backward_hooks, has_hooks


@dataclass(frozen=True, slots=True)
class Slicing:
    """How a worker holds a model that is cut into slices."""

    plan: Mapping[str, str]
    """The task's plan, as far as the job uses it: see `slice_plan.words_for`."""
    slices: int
    """The job's number of slices, a power of two."""
    link: Link = field(default_factory=Link)
    """Says which of them are hosted here, and reaches the others."""
    experts: bool = False
    """Whether all `StackedExperts` are cut, whether the plan names them or not."""

    @property
    def divides(self) -> bool:
        """Whether a worker has some of the positions only, between what is cut."""
        return DIVIDES in self.plan.values()


class CutLayers(nn.Sequential):
    """Layers in sequence, with the hosted slices of their weights: modules beside the layers, which use them."""

    def __init__(self, layers: Mapping[str, nn.Module], slices: Mapping[str, nn.Module]) -> None:
        """Hold these layers, and the slices by name."""
        super().__init__()
        for name, module in (*layers.items(), *slices.items()):
            self.add_module(name, module)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return what the last layer makes of what is given to the first one."""
        for name, module in self._modules.items():
            if not is_slice(name):
                assert module is not None, "it was added"
                given = module(given)
        return given


def cut_layers(layers: Mapping[str, nn.Module], slicing: Slicing) -> tuple[dict[str, nn.Module], dict[str, Leaf]]:
    """Return the layers without the weights that are cut, and the hosted slices of these, by name.

    These may be some of the model's layers; they change in place. Raises `TaskError` for a plan that does not fit them.
    """
    cuts = cuts_of(slicing.plan, module_names(layers), whole=False)
    if slicing.experts:
        cuts |= dict.fromkeys(stacked_experts(layers), Cut("experts"))
    found: dict[str, nn.Module] = {}
    slices: dict[str, Leaf] = {}
    for layer, module in layers.items():
        link = slicing.link
        holders = {number: Leaf() for number in hosted_slices(slicing.slices, link.rank, link.ranks)}
        found[layer] = _cut(layer, module, cuts, slicing, holders)
        for number, holder in holders.items():
            if next(holder.parameters(), None) is not None:
                slices[slice_name(layer, number)] = holder
    return found, slices


def module_names(layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of all modules of some layers, the layers' own among them."""
    return [_full(layer, path) for layer, module in layers.items() for path, _ in module.named_modules()]


def stacked_experts(layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the modules of some layers that are `StackedExperts`."""
    return [
        _full(layer, path)
        for layer, module in layers.items()
        for path, inner in module.named_modules()
        if isinstance(inner, StackedExperts)
    ]


def tied_slices(tied: Mapping[str, str], slicing: Slicing, module: nn.Module) -> dict[str, str]:
    """Return which parameters are copies of which, by the names of their slices.

    `module`: the layers that are here, cut; of two tied weights, one may be elsewhere. Raises `TaskError` if only one
    of them is cut, or if they are cut differently.
    """
    found = {}
    stacked = {name for name, one in module.named_modules() if isinstance(one, ExpertSlices)}
    for copy, owner in tied.items():
        how = [_cut_of(name, slicing) for name in (copy, owner)]
        if any(name.rpartition(".")[0] in stacked for name in (copy, owner)):
            # The plan need not name them.
            how = [Cut("experts"), Cut("experts")]
        if how == [None, None]:
            found[copy] = owner
            continue
        if len({None if one is None else (one.kind == "row", one.fused) for one in how}) > 1:
            raise TaskError(
                f"'{copy}' is tied to '{owner}', but the plan does not cut both alike",
                where=WHERE,
                expected="colwise for the one and vocab for the other, say",
            )
        for number in range(slicing.slices):
            found[slice_of_weight(copy, number)] = slice_of_weight(owner, number)
    return found


def _cut_of(parameter: str, slicing: Slicing) -> Cut | None:
    """Return how the plan cuts a parameter; None if it does not."""
    module, _, kind = parameter.rpartition(".")
    cut = cuts_of(slicing.plan, [module], whole=False).get(module)
    # The bias of rows is added once, to the sum of the slices.
    return None if cut is None or cut.kind == "replicated" or (cut.kind, kind) == ("row", "bias") else cut


def _full(layer: str, path: str) -> str:
    return ".".join(part for part in (layer, path) if part)


def _cut(
    layer: str,
    module: nn.Module,
    cuts: Mapping[str, Cut],
    slicing: Slicing,
    holders: Mapping[int, Leaf],
) -> nn.Module:
    """Cut the modules of a layer; their slices go to `holders`. Return the layer, which may be such a module itself."""
    _check_unshared(layer, module, cuts)
    meetings: dict[str, SharedInput] = {}
    for path, inner in list(module.named_modules()):
        name = _full(layer, path)
        if name not in cuts:
            continue
        parent, _, attribute = path.rpartition(".")
        if cuts[name].kind == "replicated":
            made = _replicated(name, inner, slicing, len(holders))
        elif cuts[name].kind == "experts":
            made = _experts(name, inner, slicing, {number: _leaf(holder, path) for number, holder in holders.items()})
        else:
            meeting = meetings.get(parent)
            if meeting is None:
                meeting = _meeting(module, layer, parent, cuts, slicing, len(holders))
                meetings[parent] = meeting
            slices = {number: _leaf(holder, path) for number, holder in holders.items()}
            made = _cut_module(name, inner, cuts[name], slicing, slices, meeting)
        if not path:
            module = made
        else:
            setattr(module.get_submodule(parent), attribute, made)
    if slicing.divides:
        _check_divided(layer, module)
    return module


def _meeting(
    module: nn.Module, layer: str, path: str, cuts: Mapping[str, Cut], slicing: Slicing, count: int
) -> SharedInput:
    """Return where the columns of the module at a path of a layer meet."""
    if not slicing.divides:
        return SharedInput(slicing.link, count)
    below = [cut for name, cut in cuts.items() if name.startswith(f"{_full(layer, path)}.")]
    # Its code does not see parts of the positions, because it has none: attention, say, with its norm before it.
    enters = any(cut.kind == "row" for cut in below) and not any(cut.divides for cut in below)
    if enters:
        entrance = Entrance(_full(layer, path), slicing.link)
        module.get_submodule(path).register_forward_pre_hook(entrance, with_kwargs=True)
    return SharedInput(slicing.link, count, divides=True, enters=enters)


def _replicated(name: str, module: nn.Module, slicing: Slicing, count: int) -> nn.Module:
    if type(module) is nn.Dropout and not module.inplace:
        return DividedDropout(module.p, slicing.link)
    buffer = next((at for at, _ in module.named_buffers()), None)
    if buffer is not None or has_hooks(module) or any(map(_goes_back, module.modules())):
        what = "hooks" if buffer is None else f"the buffer '{buffer}'"
        raise TaskError(f"'{name}' has {what}, so slices cannot compute parts of it", where=WHERE)
    return Replicated(module, slicing.link, count)


def _experts(name: str, module: nn.Module, slicing: Slicing, slices: Mapping[int, Leaf]) -> nn.Module:
    """Divide experts between slices. Raises `TaskError` for what is no stack of experts, or has too few."""
    count = getattr(module, "num_experts", 0)
    named = dict(module.named_parameters())
    odd = next((at for at, value in named.items() if value.dim() < 2 or len(value) != count or "." in at), None)
    if not isinstance(count, int) or not named or odd is not None:
        what = f"its parameter '{odd}' does not have one part for each" if named else "it has no parameters"
        raise TaskError(
            f"'{name}' is a {type(module).__name__}, which is no stack of experts: {what}",
            where=WHERE,
            expected="a module with num_experts, whose parameters have that many parts along their first dimension",
        )
    if next(iter(module.buffers()), None) is not None or has_hooks(module) or _goes_back(module):
        raise TaskError(f"'{name}' has buffers or hooks, which slices of its experts would not have", where=WHERE)
    if slicing.divides:
        raise TaskError(
            f"'{name}' holds experts, which need all positions, but the plan divides these between slices",
            where=f"{WHERE}: {DIVIDES}",
            remedy=f"leave {DIVIDES} out of the plan",
        )
    if count % slicing.slices:
        raise TaskError(
            f"'{name}' has {count} experts, which {slicing.slices} slices do not divide",
            where=f"parallel.experts: {slicing.slices}",
            expected=f"a power of two that divides {count}",
        )
    for number, part in slices.items():
        for kind, value in named.items():
            _keep(part, kind, value, Cut("column"), number, slicing.slices)
    return ExpertSlices(module, slices, count // slicing.slices, slicing.link)


def _goes_back(module: nn.Module) -> bool:
    """Return whether a backward pass calls hooks of a module or of its own parameters."""
    return has_backward_hooks(module) or any(map(has_accumulated_hooks, module.parameters(recurse=False)))


def _check_divided(layer: str, module: nn.Module) -> None:
    """Raise `TaskError` if a layer has weights that would only get the gradients of the own positions."""
    known = {id(value) for one in module.modules() if isinstance(one, (Row, Replicated)) for value in one.parameters()}
    for path, value in module.named_parameters():
        if value.requires_grad and id(value) not in known:
            raise TaskError(
                f"the plan divides positions between slices, so '{_full(layer, path)}' would see some of them only",
                where=f"{WHERE}: {DIVIDES}",
                expected=f"{DIVIDES} for every layer with weights that is not cut",
            )


def _leaf(holder: Leaf, path: str) -> Leaf:
    """Return the module at a path below a slice's root, made if there is none yet."""
    for part in path.split(".") if path else ():
        if not hasattr(holder, part):
            holder.add_module(part, Leaf())
        holder = getattr(holder, part)
    return holder


def _cut_module(
    name: str, module: nn.Module, cut: Cut, slicing: Slicing, slices: Mapping[int, Leaf], meeting: SharedInput
) -> nn.Module:
    wanted = nn.Embedding if cut.kind == "vocabulary" else nn.Linear
    if not isinstance(module, wanted) or type(module).forward is not wanted.forward:
        word = {"column": "colwise", "row": "rowwise", "vocabulary": "vocab"}[cut.kind]
        raise TaskError(
            f"'{name}' is a {type(module).__name__}, which cannot be cut {word}",
            where=WHERE,
            expected=f"an nn.{wanted.__name__}",
        )
    others = sorted({at for at, _ in (*module.named_parameters(), *module.named_buffers())} - {"weight", "bias"})
    if others or has_hooks(module) or _goes_back(module):
        what = f"'{others[0]}' besides weight and bias" if others else "hooks"
        raise TaskError(f"'{name}' has {what}, which slices would not have", where=WHERE)
    _check_divides(name, module, cut, slicing.slices)
    for number, part in slices.items():
        _keep(part, "weight", module.weight, cut, number, slicing.slices)
        if isinstance(module, nn.Linear) and cut.kind == "column":
            _keep(part, "bias", module.bias, cut, number, slicing.slices)
    own = list(slices.values())
    if isinstance(module, nn.Embedding):
        rows = module.num_embeddings // slicing.slices
        return Vocabulary(own, list(slices), meeting, rows, module.num_embeddings, module.padding_idx)
    if cut.kind == "row":
        return Row(own, meeting, module.bias, module.out_features)
    return Column(own, meeting, cut.fused, module.in_features, gathers=cut.gathers, keeps=cut.keeps)


def _keep(part: Leaf, kind: str, value: torch.Tensor | None, cut: Cut, number: int, slices: int) -> None:
    """Give a slice its part of a weight or bias."""
    own = None
    if value is not None:
        with torch.no_grad():
            own = nn.Parameter(
                part_of(value, cut.kind, cut.fused, number, slices).clone(memory_format=torch.contiguous_format),
                requires_grad=value.requires_grad,
            )
    part.register_parameter(kind, own)


def _check_divides(name: str, module: nn.Linear | nn.Embedding | nn.Module, cut: Cut, slices: int) -> None:
    """Raise `TaskError` if a module cannot be cut into `slices` slices."""
    if isinstance(module, nn.Embedding):
        what, count = "rows", module.num_embeddings
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise TaskError(
                f"the embedding '{name}' has max_norm, scale_grad_by_freq or sparse, which slices do not support",
                where=WHERE,
            )
    else:
        assert isinstance(module, nn.Linear), "it was checked"
        row = cut.kind == "row"
        what, count = ("inputs", module.in_features) if row else ("outputs", module.out_features)
    if count % (cut.fused * slices):
        fused = f" in each of {cut.fused} fused projections" if cut.fused > 1 else ""
        of_each = count / cut.fused
        raise TaskError(
            f"'{name}' has {of_each:g} {what}{fused}, which {slices} slices do not divide",
            where=f"parallel.tensor: {slices}",
            remedy=f"use a number of slices that divides {of_each:g}, or take '{name}' out of Task.tensor",
        )


def _check_unshared(layer: str, module: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Raise `TaskError` if a weight that is cut is also another one of its layer."""
    names: dict[int, str] = {}
    for path, value in module.named_parameters(remove_duplicate=False):
        name = _full(layer, path)
        other = names.setdefault(id(value), name)
        if other != name and {one.rpartition(".")[0] for one in (name, other)} & set(cuts):
            raise TaskError(f"'{name}' is the same parameter as '{other}', so it cannot be cut", where=WHERE)


def cuts_in(module: nn.Module) -> dict[str, tuple[SliceKind, int]]:
    """Return how the modules of a model are cut that have slices, by name: see `state.entry.Cut`."""
    return {
        name: one.cut
        for name, one in module.named_modules()
        if isinstance(one, (Column, Row, Vocabulary, ExpertSlices))
    }
