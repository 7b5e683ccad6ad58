"""The plan of tensor slices of these layers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytrain_plus.parallel.tensor.slice_plan import FEATURES_OF_EXPERTS, matches


def transformer_plan(
    *, embed: str = "", blocks: str = "", head: str = "", sequence: bool = False, experts: bool = False
) -> dict[str, str]:
    """Return what `Task.tensor` returns for a model of these layers, by their names, or patterns of them.

    `embed`: an `nn.Embedding`; `blocks`: `Block`s with `gated` networks; `head`: a `Head`, whose scores go to
    `cross_entropy`. Layers without a name are not cut. `sequence`: between attention and networks, each slice has some
    of the positions; then all three must be named. `experts`: the networks of these blocks are `Experts`, which
    `parallel.experts` divides, not this plan.

    >>> transformer_plan(embed="embed", head="head")
    {'embed': 'vocab', 'head.out': 'colwise_loss'}
    """
    plan = {embed: "vocab"} if embed else {}
    if blocks:
        plan |= {f"{blocks}.attention.{name}": "colwise" for name in ("q", "k", "v")}
        plan[f"{blocks}.attention.out"] = "rowwise"
        if not experts:
            plan |= {f"{blocks}.feed_forward.{name}": "colwise" for name in ("gate", "up")}
            plan[f"{blocks}.feed_forward.down"] = "rowwise"
    if head:
        plan[f"{head}.out"] = "colwise_loss"
    if sequence:
        names = [f"{blocks}.{name}" for name in ("norm1", "norm2", "dropout")] + [f"{head}.norm"]
        plan |= dict.fromkeys(names, "sequence_parallel")
    return plan


def adapted_plan(plan: Mapping[str, str], blocks: str, of: str = "layers.*") -> dict[str, str]:
    """Return that part of a plan that is for blocks, which have other names here.

    For example the `base_model_tp_plan` of a model of Transformers, if the layers of the task are its decoder layers:

    >>> adapted_plan({"layers.*.mlp.up_proj": "colwise", "norm": "sequence_parallel"}, "block*")
    {'block*.mlp.up_proj': 'colwise'}
    """
    return {f"{blocks}{name.removeprefix(of)}": word for name, word in plan.items() if name.startswith(f"{of}.")}


def own_plan(model: Any) -> dict[str, str]:
    """Return the plan that a model of Transformers brings, for `parallel.tensor` and `parallel.experts`: empty if none.

    It is the model's `tp_plan` and, for its experts, its `ep_plan`, as far as they are for modules that the model has.
    """
    names = [name for name, _ in model.named_modules()]
    plan = {**(getattr(model, "tp_plan", None) or {}), **(getattr(model, "ep_plan", None) or {})}
    return {
        pattern: word
        for pattern, word in plan.items()
        if word != FEATURES_OF_EXPERTS and any(matches(pattern, name) for name in names)
    }
