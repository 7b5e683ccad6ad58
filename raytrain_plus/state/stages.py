"""Merge the states of a model's stages, or restrict a state to one stage. Pure.

A tensor's name contains its layer (`param/<layer>.<rest>`, `optim/<layer>.<rest>/<key>`). Values that belong to no
layer, such as the optimizer's groups and the scheduler, are the same on every stage; they are taken from the first
stage that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from raytrain_plus.errors import TaskError
from raytrain_plus.state.entry import OF_LAYERS
from raytrain_plus.state.weight_rows import TensorKey, name_of

Tree = Any
AnyTensor = TypeVar("AnyTensor")
AnyKey = TypeVar("AnyKey", bound=TensorKey)
Wanted = Callable[[str], bool]
"""Whether a layer is wanted; `REST` stands for what belongs to no layer."""

REST = ""

_WITH_OPTIMIZER = (*OF_LAYERS, "optim/")


def layer_of(key: TensorKey) -> str | None:
    """Return the layer of a tensor of the state; None if it belongs to no layer.

    >>> layer_of("optim/block1.weight/exp_avg"), layer_of("scheduler/last"), layer_of("param/head.bias")
    ('block1', None, 'head')
    """
    name = name_of(key)
    if not name.startswith(_WITH_OPTIMIZER):
        return None
    return name.partition("/")[2].partition("/")[0].partition(".")[0]


def everything(_: str) -> bool:
    """Want every layer, and what belongs to no layer: see `Wanted`."""
    return True


def all_but(others: Collection[str]) -> Wanted:
    """Want every layer but `others`, and what belongs to no layer."""
    return lambda layer: layer not in others


def own_tensors(tensors: Mapping[AnyKey, AnyTensor], wanted: Wanted) -> dict[AnyKey, AnyTensor]:
    """Return the tensors of the wanted layers."""
    return {key: value for key, value in tensors.items() if wanted(layer_of(key) or REST)}


def own_tree(tree: Tree, wanted: Wanted) -> Tree:
    """Return the tree with the values of the wanted layers, and with all that belong to no layer.

    See `state.holding` for a tree's content.
    """

    def mine(names: Sequence[str]) -> list[str]:
        return [name for name in names if wanted(name.partition(".")[0])]

    return {
        **tree,
        "optimizer": {name: tree["optimizer"][name] for name in mine(list(tree["optimizer"]))},
        "groups": tree["groups"] and [{**group, "parameters": mine(group["parameters"])} for group in tree["groups"]],
        "scales": {name: tree["scales"][name] for name in mine(list(tree["scales"]))},
        "persistent": mine(tree["persistent"]),
        "allowed": [name for name in tree.get("allowed", ()) if wanted(layer_of(name) or REST)],
    }


def whole_tree(trees: Sequence[Tree]) -> Tree:
    """Merge the trees of all stages, in stage order. Raises `TaskError` if they have different numbers of groups."""
    # A stage that trains nothing has no optimizer, so the values of no layer cannot come from it.
    training = [tree for tree in trees if tree["groups"] is not None]
    first = (training or trees)[0]
    counts = {len(tree["groups"]) for tree in training}
    if len(counts) > 1:
        raise TaskError(
            f"the optimizer has {min(counts)} parameter groups on one stage, {max(counts)} on another",
            where="parallel.pipeline",
            expected="the same number of groups for any parameters passed to Task.optimizer; some may be empty",
        )
    return {
        **first,
        "optimizer": {name: state for tree in trees for name, state in tree["optimizer"].items()},
        "groups": [
            {
                **group,
                # Rows of one weight can be in several trees.
                "parameters": list(
                    dict.fromkeys(name for tree in training for name in tree["groups"][number]["parameters"])
                ),
            }
            for number, group in enumerate(first["groups"] or ())
        ],
        "scales": {name: scale for tree in trees for name, scale in tree["scales"].items()},
        "persistent": [name for tree in trees for name in tree["persistent"]],
        "allowed": [name for tree in trees for name in tree.get("allowed", ())],
        **{
            key: merged
            for key in ("cuts", "shared")
            if (merged := {name: one for tree in trees for name, one in tree.get(key, {}).items()})
        },
    }
