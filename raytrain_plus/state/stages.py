"""Merge the states of a model's stages, or restrict a state to one stage. Pure.

A tensor's name contains its layer (`param/<layer>.<rest>`, `optim/<layer>.<rest>/<key>`). Values that belong to no
layer, such as the optimizer's groups and the scheduler, are the same on every stage; they are taken from the first
stage that trains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from raytrain_plus.errors import TaskError

Tree = Any
AnyTensor = TypeVar("AnyTensor")

_OF_LAYERS = ("param/", "buffer/", "optim/")


def layer_of(name: str) -> str | None:
    """Return the layer of a tensor of the state; None if it belongs to no layer.

    >>> layer_of("optim/block1.weight/exp_avg"), layer_of("scheduler/last"), layer_of("param/head.bias")
    ('block1', None, 'head')
    """
    if not name.startswith(_OF_LAYERS):
        return None
    return name.partition("/")[2].partition("/")[0].partition(".")[0]


def own_tensors(tensors: Mapping[str, AnyTensor], others: Collection[str]) -> dict[str, AnyTensor]:
    """Return the tensors without those of the layers `others`."""
    return {name: value for name, value in tensors.items() if layer_of(name) not in others}


def own_tree(tree: Tree, others: Collection[str]) -> Tree:
    """Return the tree without the values of the layers `others`; see `state.holding` for a tree's content."""

    def mine(names: Sequence[str]) -> list[str]:
        return [name for name in names if name.partition(".")[0] not in others]

    return {
        **tree,
        "optimizer": {name: tree["optimizer"][name] for name in mine(list(tree["optimizer"]))},
        "groups": tree["groups"] and [{**group, "parameters": mine(group["parameters"])} for group in tree["groups"]],
        "scales": {name: tree["scales"][name] for name in mine(list(tree["scales"]))},
        "persistent": mine(tree["persistent"]),
        "allowed": [name for name in tree.get("allowed", ()) if layer_of(name) not in others],
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
            {**group, "parameters": [name for tree in training for name in tree["groups"][number]["parameters"]]}
            for number, group in enumerate(first["groups"] or ())
        ],
        "scales": {name: scale for tree in trees for name, scale in tree["scales"].items()},
        "persistent": [name for tree in trees for name in tree["persistent"]],
        "allowed": [name for tree in trees for name in tree.get("allowed", ())],
    }
