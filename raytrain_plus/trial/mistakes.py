"""Say what a task's author did wrong, given what the task's code raised: one sentence, and the remedy. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raytrain_plus.errors import TaskError
from raytrain_plus.job.settings import EarlyStop, KeepBest

Described = Mapping[str, str]
"""The values of a batch: name -> type and shape, such as `float32 (8, 64)`."""

_SHOWN = 8
"""Maximum number of a batch's values in a message."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What would be right, and what to do: two fragments of a message; either may be empty."""

    expected: str = ""
    remedy: str = ""


_OF_MODELS = "parameters|named_parameters|configure_optimizers|modules|named_modules|children"
"""What a model has, and the parameters that `optimizer` is called with have not."""
NO_MEMORY = Advice(
    remedy="use more parallel.microbatches or data.shards, a smaller data.batch_size, or a larger machine"
)
"""The advice if memory ran out."""


def check_best(best: EarlyStop | KeepBest | None, metrics: Mapping[str, float]) -> None:
    """Raise `TaskError` if `evaluate`, which returned `metrics`, does not return the one that chooses the best."""
    if best is None or best.metric in metrics:
        return
    near = difflib.get_close_matches(best.metric, metrics, 1)
    raise TaskError(
        f"evaluate returns no metric '{best.metric}'",
        where="early_stop.metric" if isinstance(best, EarlyStop) else "checkpoint.keep_best.metric",
        expected=f"one of {', '.join(metrics)}" if metrics else "a metric that evaluate returns; it returns none",
        remedy=f"did you mean '{near[0]}'?" if near else "",
    )


def advice_for(kind: str, text: str, batch: Described) -> Advice:
    """Return the advice for an exception of the type `kind` with that text, which the task raised on that batch."""
    for rule in (
        _missing_key,
        _integers,
        _labels,
        _indices,
        _shapes,
        _nothing_to_train,
        _untracked,
        _attribute,
        _one_row,
        _in_place,
        _many_shapes,
        _no_compiler,
    ):
        found = rule(kind, text, batch)
        if found is not None:
            return found
    return Advice(expected=spelled(batch) and f"a task for batches of {spelled(batch)}")


def spelled(batch: Described) -> str:
    """Return the batch in words.

    >>> spelled({"pixels": "float32 (8, 64)", "label": "int64 (8,)"})
    "'pixels': float32 (8, 64), 'label': int64 (8,)"
    """
    some = [f"'{name}': {value}" for name, value in list(batch.items())[:_SHOWN]]
    return ", ".join([*some, *["..."] * (len(batch) > _SHOWN)])


def _missing_key(kind: str, text: str, batch: Described) -> Advice | None:
    if kind != "KeyError":
        return None
    wanted = text.strip("'\"")
    if not batch or wanted in batch:
        return None
    near = difflib.get_close_matches(wanted, batch, 1)
    return Advice(
        expected=f"one of the batch's names: {', '.join(batch)}",
        remedy=f"did you mean '{near[0]}'?" if near else "correct the name, or add the column to the data",
    )


def _integers(kind: str, text: str, batch: Described) -> Advice | None:
    if not re.search(
        r"must have the same dtype|expected scalar type|expected m1 and m2 to have the same dtype|"
        r"not implemented for '(Long|Int|Short|Byte|Char|Bool)'|should be the same|"
        r"only Tensors of floating point",
        text,
    ):
        return None
    # Of several dimensions, because a vector of integers is likely to be the labels.
    whole = [name for name, value in batch.items() if re.match(r"(u?int\d+|bool) \(\d+, ", value)]
    doubles = [name for name, value in batch.items() if value.startswith("float64")]
    named = (whole + doubles)[:1]
    return Advice(
        expected="input of the model's type" + (f"; the batch has {spelled(batch)}" if batch else ""),
        remedy=f"convert it, as in batch['{named[0]}'].float()" if named else "convert the model's input with .float()",
    )


def _labels(kind: str, text: str, batch: Described) -> Advice | None:
    found = re.search(r"Target (-?\d+) is out of bounds", text)
    if found is None:
        return None
    return Advice(
        expected="labels from 0 to the number of the model's outputs less 1",
        remedy=f"give the last layer at least {int(found[1]) + 1} outputs, or correct the labels"
        if int(found[1]) >= 0
        else "correct the labels; rows without one can be left out with ignore_index",
    )


def _indices(kind: str, text: str, batch: Described) -> Advice | None:
    if "index out of range in self" not in text:
        return None
    return Advice(
        expected="indices from 0 to the embedding's num_embeddings less 1",
        remedy="enlarge the nn.Embedding, or correct the values that it looks up",
    )


def _shapes(kind: str, text: str, batch: Described) -> Advice | None:
    if not re.search(r"shapes cannot be multiplied|size mismatch|must match the size|sizes? of tensor", text, re.I):
        return None
    return Advice(
        expected=f"shapes that fit the layers; the batch has {spelled(batch)}" if batch else "shapes that fit",
        remedy="correct the size of the layer that the traceback names, or reshape its input",
    )


def _nothing_to_train(kind: str, text: str, batch: Described) -> Advice | None:
    if "optimizer got an empty parameter list" not in text:
        return None
    return Advice(
        expected="an optimizer of at least one of the (name, parameter) pairs that it is given",
        remedy="correct the condition by which optimizer() chooses parameters; it sees those that require a gradient",
    )


def _untracked(kind: str, text: str, batch: Described) -> Advice | None:
    if "does not require grad" not in text:
        return None
    return Advice(
        expected="a loss that is computed from the model's output",
        remedy="leave out detach(), item() and torch.no_grad() on the way from the output to the loss",
    )


def _attribute(kind: str, text: str, batch: Described) -> Advice | None:
    if kind == "AttributeError" and re.search(rf"'list' object has no attribute '({_OF_MODELS})'", text):
        return Advice(
            expected="optimizer(self, parameters), called with (name, parameter) pairs",
            remedy="make the optimizer of these; optimizer(self, parameters, model) gets the model too",
        )
    if kind != "AttributeError" or "'dict' object has no attribute" not in text:
        return None
    wanted = text.rpartition("'dict' object has no attribute ")[2].strip("'\" .")
    if wanted not in batch:
        return None
    return Advice(expected=f"batch['{wanted}']", remedy="a batch is a dict, so its values are found by name")


def _one_row(kind: str, text: str, batch: Described) -> Advice | None:
    if "Expected more than 1 value per channel" not in text:
        return None
    return Advice(
        expected="at least two rows in a microbatch, for BatchNorm",
        remedy="use fewer data.shards or a larger data.batch_size, or a layer such as GroupNorm",
    )


def _in_place(kind: str, text: str, batch: Described) -> Advice | None:
    if "modified by an inplace operation" not in text:
        return None
    return Advice(
        expected="operations that leave alone what a backward pass still needs",
        remedy="do without in-place operations such as x += y, x.mul_(2) and ReLU(inplace=True), above all on the "
        "input of a layer that `recompute` computes again",
    )


def _many_shapes(kind: str, text: str, batch: Described) -> Advice | None:
    if kind != "FailOnRecompileLimitHit":
        return None
    return Advice(
        expected="inputs of few shapes, each of which a layer is compiled for",
        remedy="make batches of equal shapes, or set compile to false",
    )


def _no_compiler(kind: str, text: str, batch: Described) -> Advice | None:
    if not re.search(r"InvalidCxxCompiler|No working C\+\+ compiler", f"{kind}: {text}"):
        return None
    return Advice(
        expected="a C++ compiler on every machine that trains, which compile: true needs on CPUs",
        remedy="install g++, or set compile to false",
    )


def breaks_in_words(breaks: Sequence[str]) -> str:
    """Return that some operations are not compiled, with the first reason of those that torch gives.

    >>> breaks_in_words(["Failed to trace\\n  Explanation: Dynamo does not know `print`.\\n  Hint: none", "another"])
    'the layers leave compiled code at 2 places, and are slower for it: Failed to trace. Dynamo does not know `print`.'
    """
    places = "a place" if len(breaks) == 1 else f"{len(breaks)} places"
    first = ". ".join(line.strip().removeprefix("Explanation: ") for line in breaks[0].strip().splitlines()[:2])
    return f"the layers leave compiled code at {places}, and are slower for it: {first}"
