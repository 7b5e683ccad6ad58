"""Check the values of a job's settings, one by one and together. Pure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, get_args

from raytrain_plus.credentials import REMEDY, credential_in
from raytrain_plus.errors import InputError
from raytrain_plus.job import parallel_checks
from raytrain_plus.job.parallel_checks import Problem
from raytrain_plus.job.setting_types import Format
from raytrain_plus.storage.address import SCHEMES, is_address


def check_values(values: Mapping[str, Any]) -> list[InputError]:
    """Return what is wrong with settings whose types are right.

    `values` maps dotted keys to values; a check is skipped unless all of its settings are in it.
    """
    problems = [problem for key, value in values.items() for problem in _credentials(value, key)]
    for keys, check in _CHECKS:
        if all(key in values for key in keys):
            problem = check(*(values[key] for key in keys))
            if problem is not None:
                problems.append(InputError(problem[0], where=keys[0], expected=problem[1], remedy=problem[2]))
    return problems


def _credentials(value: Any, key: str) -> Iterator[InputError]:
    """Yield an error per address with a credential: settings are written to the run's folder and widely shown."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _credentials(name, key)
            yield from _credentials(one, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from _credentials(one, f"{key}[{place}]")
    elif isinstance(value, str) and (part := credential_in(value)):
        reference = "; or refer to an environment variable with ${env:NAME}" * key.startswith("args")
        yield InputError(f"the address contains a credential: {part}", where=key, remedy=f"{REMEDY}{reference}")


def _name(name: str) -> Problem:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        return None
    why = "contains a path separator" if "/" in name or "\\" in name else "is not a valid name"
    return (
        f"{name!r} {why}",
        "letters, digits, '.', '_' and '-', starting with a letter or digit, at most 128 characters",
        "set the folder with `storage`",
    )


MOST = 10**9
"""Limit of every count and every time in seconds: a larger value is a mistake, and overflows 64 bits or a clock."""


def _at_least(lowest: float, highest: float = MOST) -> Callable[[float | None], Problem]:
    def check(value: float | None) -> Problem:
        if value is None or (math.isfinite(value) and lowest <= value <= highest):
            return None
        bound = f"at most {highest:,}" if value > highest else f"{lowest:g} or more"
        return f"{value} is not allowed", bound, ""

    return check


def _above_zero(value: float | None) -> Problem:
    if value is None or (math.isfinite(value) and value > 0):
        return None
    return f"{value} is not allowed", "a number above 0", ""


def _seconds(value: float | None) -> Problem:
    if value is None or value <= MOST:
        return _above_zero(value)
    return f"{value} is not allowed", f"at most {MOST:,} seconds", ""


def _batch(batch_size: int, shards: int) -> Problem:
    if shards < 1 or batch_size < 1 or batch_size % shards == 0:
        return None
    below = batch_size // shards * shards
    nearest = " or ".join(str(value) for value in (below, below + shards) if value)
    return (
        f"{batch_size} is not a multiple of data.shards = {shards}",
        f"{nearest}, for example",
        "choose a multiple of data.shards: every shard gives every step the same number of rows",
    )


TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "string", "binary", "large_string", "large_binary"),
)
"""The types of columns that `data.columns` can name, as Arrow names them."""
MOST_PIXELS = 16_384
"""Limit of the height and the width of images."""


def _columns(columns: Sequence[str] | Mapping[str, str] | None) -> Problem:
    if columns is None:
        return None
    if not columns or len(set(columns)) != len(columns):
        return ("it names no column" if not columns else "it names a column twice"), "the names of columns", ""
    for name, kind in columns.items() if isinstance(columns, Mapping) else ():
        if kind not in TYPES:
            near = difflib.get_close_matches(str(kind), TYPES, 1)
            remedy = f"did you mean '{near[0]}'?" if near else "leave the type out if it need not change"
            return f"'{kind}' is not a type that a column can be read with ('{name}')", ", ".join(TYPES), remedy
    return None


def _image_size(size: Sequence[int] | None) -> Problem:
    if size is None or (len(size) == 2 and all(1 <= pixels <= MOST_PIXELS for pixels in size)):
        return None
    return (
        f"{[*size]} is not a size of images",
        f"[height, width], each from 1 to {MOST_PIXELS:,} pixels",
        "",
    )


def _length(steps: int | None, epochs: int | None) -> Problem:
    if (steps is None) != (epochs is None):
        return None
    given = "neither `steps` nor `epochs` is given" if steps is None else "both `steps` and `epochs` are given"
    return given, "exactly one of them", ""


def _source(path: str | None, dataset: str | None) -> Problem:
    if (path is None) != (dataset is None):
        return None
    given = "neither `path` nor `dataset` is given" if path is None else "both `path` and `dataset` are given"
    return given, "exactly one of them", ""


def _training_source(path: str | None, dataset: str | None, mix: Sequence[Any] | None) -> Problem:
    named = {"`path`": path, "`dataset`": dataset, "`mix`": mix}
    given = [name for name, value in named.items() if value is not None]
    if len(given) == 1:
        return None
    if not given:
        return "neither `path` nor `dataset` nor `mix` is given", "exactly one of them", ""
    what = f"both {' and '.join(given)} are given" if len(given) == 2 else "`path`, `dataset` and `mix` are given"
    return what, "exactly one of them", ""


MOST_SOURCES = 16
"""Maximum sources of `data.mix`."""
LEAST_SHARE = Fraction(1, 10_000)
"""Minimum share of a source in the rows: one place of the longest pattern; see `data.order.mixed_order`."""
_OF_SOURCE = ("path", "dataset", "format", "weight")


def _mix(mix: Sequence[Mapping[str, Any]] | None) -> Problem:
    if mix is None:
        return None
    if not 2 <= len(mix) <= MOST_SOURCES:
        what = f"{len(mix)} source{'s' * (len(mix) != 1)} cannot be mixed"
        return what, f"2 to {MOST_SOURCES} sources", "for a single one use data.path" if len(mix) == 1 else ""
    for number, source in enumerate(mix):
        if problem := _source_of_mix(source):
            return f"source {number}: {problem[0]}", problem[1], problem[2]
    weights = [Fraction(str(source["weight"])) for source in mix]
    for number, weight in enumerate(weights):
        if weight < LEAST_SHARE * sum(weights):
            return f"source {number}: its weight is less than a ten-thousandth of all weights", "a larger weight", ""
    return None


def _source_of_mix(source: Mapping[str, Any]) -> Problem:
    """Return what is wrong with one source of a mix."""
    for key in source:
        if key not in _OF_SOURCE:
            near = difflib.get_close_matches(key, _OF_SOURCE, 1)
            remedy = f"did you mean '{near[0]}'?" if near else ""
            return f"unknown setting '{key}'", f"one of {', '.join(_OF_SOURCE)}", remedy
    path, dataset, form, weight = (source.get(key) for key in _OF_SOURCE)
    for key, value in (("path", path), ("dataset", dataset)):
        if value is not None and not isinstance(value, str):
            return f"its {key} {value!r} is not allowed", "a string", ""
    if problem := _source(path, dataset) or _reference(dataset) or _address(path):
        return problem
    if form is not None and (form not in get_args(Format) or dataset is not None):
        what = f"its format {form!r} is not allowed"
        return what, f"one of {', '.join(get_args(Format))}, for a path", ""
    if weight is None:
        return "its weight is missing", "a number above 0", ""
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not (0 < weight <= MOST):
        return f"its weight {weight!r} is not allowed", f"a number above 0, at most {MOST:,}", ""
    return None


def _mixed_length(epochs: int | None, mix: Sequence[Any] | None) -> Problem:
    if epochs is None or mix is None:
        return None
    return "each source of data.mix has epochs of its own, so they are no length", "`steps` in place of `epochs`", ""


def _mixed_format(form: str | None, mix: Sequence[Any] | None) -> Problem:
    if form is None or mix is None:
        return None
    return "each source of data.mix has a format of its own", "`format` in the sources of data.mix, or none", ""


def _only_paths(value: str | None, dataset: str | None) -> Problem:
    if value is None or dataset is None:
        return None
    return "it is for data at a path, and data.dataset is given", "data.path instead of data.dataset, or neither", ""


EXACT_SHARDS = 4096
"""Maximum shards with `reduction: exact`: with more, its grid would have to be coarser than float32."""


def _exact(reduction: str, shards: int) -> Problem:
    if reduction != "exact" or shards <= EXACT_SHARDS:
        return None
    return f"data.shards = {shards} is too many for an exact sum", f"at most {EXACT_SHARDS} shards", ""


def _compression(compression: str, reduction: str) -> Problem:
    if compression == "none" or reduction != "exact":
        return None
    what = f"compression: {compression} rounds the gradients on their way, so that reduction: exact cannot hold"
    return what, "compression: none, or reduction: ring", ""


def _decay(decay: float) -> Problem:
    return None if 0 < decay < 1 else (f"{decay:g} is not allowed", "a number above 0 and below 1, such as 0.999", "")


def _gpus(gpus: float) -> Problem:
    return None if gpus in (0, 1) else (f"{gpus:g} is not allowed", "0 or 1: a worker trains on one device", "")


def _accelerator(name: str | None) -> Problem:
    if name is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        return None
    return f"{name!r} is not an accelerator type", "a type of Ray, such as H100 or A100", ""


def _reference(spec: str | type | None) -> Problem:
    if not isinstance(spec, str) or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", spec):
        return None
    module, dot, name = spec.rpartition(".")
    near = f"{module}:{name}"
    remedy = f"did you mean '{near}'?" if dot and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", near) else ""
    return f"{spec!r} is not an import path", "module:name, such as examples.digits:Digits", remedy


COLLATES = ("stack", "pad", "pack")
"""The ready functions of `data.collate`."""


def _collate(spec: str) -> Problem:
    if spec in COLLATES or _reference(spec) is None:
        return None
    near = difflib.get_close_matches(spec, COLLATES, 1)
    return (
        f"unknown function {spec!r}",
        f"{', '.join(COLLATES)}, or module:function",
        f"did you mean '{near[0]}'?" if near else "",
    )


def _packed(collate: str | None, pipeline: int, tensor: int) -> Problem:
    if collate != "pack" or pipeline * tensor == 1:
        return None
    what = "packed microbatches differ in their number of tokens, and stages need the same shapes in every step"
    return what, "pad, stack or module:function, or parallel.pipeline: 1 and parallel.tensor: 1", ""


MOST_TOKENS = 1 << 20
"""Limit of the tokens of a packed row."""


def _one_length(pack: int | None, collate: str | None) -> Problem:
    if pack is None or collate not in ("pad", "pack"):
        return None
    what = f"all rows have {pack:,} tokens already, so there is nothing for data.collate: {collate} to do"
    return what, "data.collate: stack or module:function, or none", ""


def _no_images(pack: int | None, image_size: Sequence[int] | None) -> Problem:
    if pack is None or image_size is None:
        return None
    return "packed rows hold tokens and no images, so data.image_size has no use", "one of both", ""


def _skipped_rows(on_error: str, pipeline: int, tensor: int, sharded: str) -> Problem:
    if on_error == "stop" or (pipeline * tensor == 1 and sharded != "full"):
        return None
    what = "data.on_error: skip needs the whole model in each worker; stages do not tell one another which rows fail"
    return what, "data.on_error: stop, or parallel.pipeline: 1, tensor: 1 and not sharded: full", ""


def _best(metric: str, evaluate: None) -> Problem:
    return f"{metric!r} needs an evaluation, and none is configured", "an `evaluate` group", ""


def _one_best(stops: str, better: str, kept: str, best: str) -> Problem:
    if (stops, better) == (kept, best):
        return None
    what = f"early_stop keeps the best state by {stops} ({better}), and checkpoint.keep_best by {kept} ({best})"
    return what, "the same metric and mode, or no checkpoint.keep_best", ""


def _address(place: str | None) -> Problem:
    if place is None or not is_address(place):
        return None
    scheme = place.partition("://")[0]
    if scheme in SCHEMES:
        return None
    # Not the whole address: it may hold a password.
    return f"unsupported address '{scheme}://...'", f"a path, or {', '.join(f'{known}://' for known in SCHEMES)}", ""


def _profiled(steps: Sequence[int]) -> Problem:
    if len(steps) == 2 and 0 <= steps[0] < steps[1] <= MOST:
        return None
    return f"{[*steps]} is not a range of steps", "[first, end]: two rising whole numbers, 0 or more", ""


def _profiled_within(profiled: Sequence[int], steps: int | None) -> Problem:
    if steps is None or _profiled(profiled) or profiled[1] <= steps:
        return None
    return beyond_the_end(profiled, steps)


def beyond_the_end(profiled: Sequence[int], steps: int) -> tuple[str, str, str]:
    """Return that the steps to profile are not all among the steps of the job: what, expected, remedy."""
    what = f"{[*profiled]} ends after the job's last step: it has {steps:,} steps"
    return what, f"an end of at most {steps}", ""


TRACKERS = ("mlflow", "wandb")
"""Supported trackers, by the names of their packages."""


def _trackers(names: Sequence[str]) -> Problem:
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        there = f"{' or '.join(TRACKERS)}; TensorBoard files are always written"
        near = difflib.get_close_matches(unknown[0], TRACKERS, 1)
        return f"unknown tracker {unknown[0]!r}", there, f"did you mean '{near[0]}'?" if near else ""
    return ("a tracker is listed twice", "each tracker once", "") if len(set(names)) < len(names) else None


_CHECKS: Sequence[tuple[tuple[str, ...], Callable[..., Problem]]] = (
    (("name",), _name),
    (("task",), _reference),
    (("data.path", "data.dataset", "data.mix"), _training_source),
    (("data.path",), _address),
    (("data.mix",), _mix),
    (("epochs", "data.mix"), _mixed_length),
    (("data.format", "data.mix"), _mixed_format),
    (("data.dataset",), _reference),
    (("data.format", "data.dataset"), _only_paths),
    (("data.prepare", "data.dataset"), _only_paths),
    (("data.batch_size",), _at_least(1)),
    (("data.shards",), _at_least(1, 100_000)),
    (("data.batch_size", "data.shards"), _batch),
    (("data.columns",), _columns),
    (("data.image_size",), _image_size),
    (("data.prepare",), _reference),
    (("data.transform",), _reference),
    (("data.collate",), _collate),
    (("data.collate", "parallel.pipeline", "parallel.tensor"), _packed),
    (("data.pack",), _at_least(2, MOST_TOKENS)),
    (("data.pack", "data.collate"), _one_length),
    (("data.pack", "data.image_size"), _no_images),
    (("data.on_error", "parallel.pipeline", "parallel.tensor", "parallel.sharded"), _skipped_rows),
    (("data.granule",), _at_least(1)),
    (("data.cache_mb",), _at_least(0)),
    (("steps",), _at_least(1)),
    (("epochs",), _at_least(1)),
    (("steps", "epochs"), _length),
    (("workers.min",), _at_least(1, 1_000_000)),
    (("workers.max", "workers.min"), parallel_checks.sizes),
    (("workers.min", "data.shards", "parallel.pipeline", "parallel.tensor"), parallel_checks.shard_room),
    (("workers.max", "workers.min", "parallel.pipeline"), parallel_checks.one_replica),
    (("parallel.pipeline",), _at_least(1, 1_000)),
    (("parallel.tensor", "parallel.schedule", "parallel.sharded", "compile"), parallel_checks.tensor),
    (("workers.spares",), _at_least(0, 1_000_000)),
    (("workers.cpus",), _at_least(0, 1_000_000)),
    (("workers.gpus",), _gpus),
    (("workers.accelerator",), _accelerator),
    (("workers.threads",), _at_least(1, 1_000)),
    (("parallel.microbatches",), _at_least(1, 10_000)),
    (("parallel.partition", "parallel.pipeline", "parallel.schedule"), parallel_checks.partition),
    (("parallel.commit_every",), _at_least(1, 10_000)),
    (
        (
            "parallel.schedule",
            "parallel.pipeline",
            "reduction",
            "clip_norm",
            "workers.min",
            "elastic.on_nonfinite",
        ),
        parallel_checks.pipedream,
    ),
    (("parallel.sharded", "parallel.pipeline", "parallel.schedule"), parallel_checks.sharded),
    (
        (
            "parallel.holders",
            "parallel.sharded",
            "workers.max",
            "workers.min",
            "data.shards",
            "parallel.pipeline",
            "parallel.tensor",
        ),
        parallel_checks.holders,
    ),
    (("parallel.microbatches", "data.batch_size", "data.shards"), parallel_checks.microbatches),
    (("reduction", "data.shards"), _exact),
    (("compression", "reduction"), _compression),
    (("recompute", "parallel.schedule"), parallel_checks.recompute),
    (("compile", "parallel.schedule"), parallel_checks.compiled),
    (("ema.decay",), _decay),
    (("collective", "workers.gpus", "parallel.tensor", "reduction"), parallel_checks.collective),
    (("precision", "parallel.schedule", "workers.gpus"), parallel_checks.precision),
    (("clip_norm",), _above_zero),
    (("elastic.hang_timeout_s",), _seconds),
    (("elastic.max_failures",), _at_least(0)),
    (("elastic.wait_s",), _seconds),
    (("elastic.copy_every",), _at_least(1)),
    (("elastic.stop_grace_s",), _seconds),
    (("checkpoint.every_steps",), _at_least(1)),
    (("checkpoint.every_s",), _seconds),
    (("checkpoint.keep",), _at_least(1)),
    (("checkpoint.keep_best.metric", "evaluate"), _best),
    (("early_stop.metric", "evaluate"), _best),
    (("early_stop.patience",), _at_least(1)),
    (
        ("early_stop.metric", "early_stop.mode", "checkpoint.keep_best.metric", "checkpoint.keep_best.mode"),
        _one_best,
    ),
    (("evaluate.path", "evaluate.dataset"), _source),
    (("evaluate.path",), _address),
    (("evaluate.dataset",), _reference),
    (("evaluate.every_steps",), _at_least(1)),
    (("trackers",), _trackers),
    (("profile.steps",), _profiled),
    (("profile.steps", "steps"), _profiled_within),
    (("profile.workers",), _at_least(1)),
    (("storage",), _address),
)
"""(keys, check of their values); an error is reported at the first key."""
