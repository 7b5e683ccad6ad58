"""Read a task's plan of its tensor slices: which modules are cut, and how. Pure.

A plan has the words of torch's `parallelize_module` and of Transformers' `base_model_tp_plan`. Its keys are module
names, in which `*` stands for anything between two dots.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from raytrain_plus.errors import TaskError

SliceKind = Literal["column", "row", "vocabulary"]
Kind = SliceKind | Literal["replicated", "experts"]

WORDS: Mapping[str, Kind] = {
    "colwise": "column",
    "rowwise": "row",
    "vocab": "vocabulary",
    "colwise_loss": "column",
    "sequence_parallel": "replicated",
    # Transformers' words for the same.
    "packed_colwise": "column",
    "colwise_rep": "column",
    "colwise_gather_output": "column",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "replicated",
    "experts": "experts",
    "ep_dispatch_experts": "experts",
}
OF_EXPERTS = ("experts", "ep_dispatch_experts")
"""The words for modules whose experts are divided between slices: with `parallel.experts`, not `parallel.tensor`."""
_WITH_EXPERTS = ("grouped_gemm",)
"""Transformers' word for the parameters of such modules, which are divided with them."""
FEATURES_OF_EXPERTS = "moe_tp_experts"
"""Transformers' word for experts that are cut by their features, which is not offered."""
DIVIDES = "sequence_parallel"
"""The word of a plan under which, between what is cut, each slice has some of the positions."""
_GATHERS = ("colwise_rep", "colwise_gather_output")
_KEEPS = ("colwise_loss",)
"""Words for columns whose outputs stay with their slices, for `layers.cross_entropy`."""
WHERE = "Task.tensor"
"""Place of an error in a plan."""
FUSED = {"qkv": 3, "gate_up": 2}
"""Projections in one weight, by what the module's name contains: each is cut by itself."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a module is cut, or `replicated`: each slice has its weights, and some of the positions, or heads.

    `experts`: each slice has some of the experts.
    """

    kind: Kind
    gathers: bool = False
    """Whether a column's outputs are put together again: nothing that follows in the same module is cut by rows."""
    keeps: bool = False
    """Whether a column's outputs stay with their slices, and leave the model so."""
    fused: int = 1
    """How many projections a column's weight consists of."""
    divides: bool = False
    """Whether a replicated module computes some of the positions, rather than of the heads."""


def words_for(plan: Mapping[str, str], *, tensor: bool, experts: bool) -> dict[str, str]:
    """Return the part of a plan that a job uses: for `parallel.tensor`, for `parallel.experts`, or for both.

    >>> words_for({"*.up": "colwise", "*.experts": "experts"}, tensor=False, experts=True)
    {'*.experts': 'experts'}

    Raises `TaskError` for a word that is nearly one for experts; other words are checked where they are used.
    """
    for pattern, word in plan.items():
        if word not in WORDS and difflib.get_close_matches(word, OF_EXPERTS, 1, 0.8):
            raise _unknown(pattern, word)
    found = {name: word for name, word in plan.items() if word not in _WITH_EXPERTS}
    return {name: word for name, word in found.items() if (experts if word in OF_EXPERTS else tensor)}


def cuts_of(plan: Mapping[str, str], names: Collection[str], *, whole: bool = True) -> dict[str, Cut]:
    """Return how each module of these names is cut; those that the plan does not name are left out.

    `whole`: these are the names of the whole model, so that each key must name a module. Raises `TaskError` for a key
    that names none, for an unknown word, if two words are for one module, and for rows without columns before them.

    >>> found = cuts_of({"*.qkv": "colwise", "*.mix": "rowwise", "head": "colwise"}, ["a.qkv", "a.mix", "head"])
    >>> [(name, cut.kind, cut.gathers, cut.fused) for name, cut in found.items()]
    [('a.qkv', 'column', False, 3), ('a.mix', 'row', False, 1), ('head', 'column', True, 1)]
    """
    words: dict[str, str] = {}
    for pattern, word in plan.items():
        if word not in WORDS:
            raise _unknown(pattern, word)
    for pattern, word in plan.items():
        found = [name for name in names if matches(pattern, name)]
        if whole and not found:
            near = difflib.get_close_matches(pattern, names, 1)
            raise TaskError(
                f"no layer of the model is called '{pattern}'",
                where=WHERE,
                expected="names of modules, in which * stands for anything between two dots",
                remedy=f"did you mean '{near[0]}'?" if near else "",
            )
        for name in found:
            if words.setdefault(name, word) != word:
                raise TaskError(f"the plan cuts '{name}' both by '{words[name]}' and by '{word}'", where=WHERE)
    replicated = [f"{name}." for name, word in words.items() if WORDS[word] == "replicated"]
    cuts = {}
    for name, word in words.items():
        parent = name.rpartition(".")[0]
        if (above := next((one for one in replicated if name.startswith(one)), None)) is not None:
            raise TaskError(f"the plan names '{name}', and '{above[:-1]}', of which it is a part", where=WHERE)
        kind = WORDS[word]
        beside = {WORDS[how] for other, how in words.items() if parent and other.startswith(f"{parent}.")}
        keeps = word in _KEEPS
        gathers = word in _GATHERS or ("row" not in beside and not keeps)
        if whole and kind == "row" and "column" not in beside:
            raise TaskError(
                f"the plan cuts '{name}' rowwise, but nothing beside it colwise, which would make its inputs",
                where=WHERE,
                expected="colwise for the layers before it, in the same module",
            )
        fused = next((count for part, count in FUSED.items() if part in name.rpartition(".")[2].lower()), 1)
        column = kind == "column"
        cuts[name] = Cut(kind, gathers and column, keeps, fused if column else 1, word == DIVIDES)
    return cuts


def matches(pattern: str, name: str) -> bool:
    """Return whether a module's name is one that a key of a plan stands for."""
    patterns, parts = pattern.split("."), name.split(".")
    return len(patterns) == len(parts) and all(
        fnmatchcase(part, one) for part, one in zip(parts, patterns, strict=True)
    )


def _unknown(pattern: str, word: str) -> TaskError:
    of_experts = "layers.own_plan(model) is the model's plan with its experts whole, or cut by parallel.experts"
    return TaskError(
        f"the plan cuts '{pattern}' by '{word}'",
        where=WHERE,
        expected=f"one of {', '.join(WORDS)}",
        remedy=of_experts if word == FEATURES_OF_EXPERTS else "",
    )
