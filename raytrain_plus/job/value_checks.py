"""Check the values of a job's settings together; the bounds of each stand at its field. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from raytrain_plus.credentials import REMEDY, credential_in
from raytrain_plus.errors import InputError
from raytrain_plus.job import parallel_checks
from raytrain_plus.job.bounds import one_place, step_range
from raytrain_plus.job.setting_types import Numbers, Problem


def check_values(values: Mapping[str, Any]) -> list[InputError]:
    """Return what is wrong with settings together, whose types are right; what is wrong with one alone is its own.

    `values` maps dotted keys to values; a check is skipped unless all of its settings are in it.
    """
    problems = []
    for keys, check in _CHECKS:
        if all(key in values for key in keys):
            problem = check(*(values[key] for key in keys))
            if problem is not None:
                problems.append(InputError(problem[0], where=keys[0], expected=problem[1], remedy=problem[2]))
    return problems


def credentials_in(value: Any, key: str) -> Iterator[InputError]:
    """Yield an error per address with a credential: settings are written to the run's folder and widely shown."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from credentials_in(name, key)
            yield from credentials_in(one, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from credentials_in(one, f"{key}[{place}]")
    elif isinstance(value, str) and (part := credential_in(value)):
        reference = "; or refer to an environment variable with ${env:NAME}" * key.startswith("args")
        yield InputError(f"the address contains a credential: {part}", where=key, remedy=f"{REMEDY}{reference}")


def _batch(batch_size: int, shards: int) -> Problem:
    if min(shards, batch_size) < 1 or batch_size % shards == 0:
        return None
    below = batch_size // shards * shards
    nearest = " or ".join(str(value) for value in (below, below + shards) if value)
    return (
        f"{batch_size} is not a multiple of data.shards = {shards}",
        f"{nearest}, for example",
        "choose a multiple of data.shards: every shard gives every step the same number of rows",
    )


def _length(steps: int | None, epochs: int | None) -> Problem:
    if (steps is None) != (epochs is None):
        return None
    given = "neither `steps` nor `epochs` is given" if steps is None else "both `steps` and `epochs` are given"
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


def _packed(collate: str | None, pipeline: int, tensor: int, experts: int) -> Problem:
    if collate != "pack" or pipeline * tensor * experts == 1:
        return None
    what = "packed microbatches differ in their number of tokens, and stages need the same shapes in every step"
    return what, "pad, stack or module:function, or parallel.pipeline, tensor and experts: 1", ""


def _grouped(column: str | None, dataset: str | None, shuffle: str, pack: int | None) -> Problem:
    if column is None or (dataset is not None and shuffle == "rows" and pack is None):
        return None
    what = "rows are grouped by length out of a dataset that is read by index, and shuffled"
    return what, "data.dataset, data.shuffle: rows and no data.pack", ""


def _one_length(pack: int | None, collate: str | None) -> Problem:
    if pack is None or collate not in ("pad", "pack"):
        return None
    what = f"all rows have {pack:,} tokens already, so there is nothing for data.collate: {collate} to do"
    return what, "data.collate: stack or module:function, or none", ""


def _no_images(pack: int | None, image_size: Sequence[int] | None) -> Problem:
    if pack is None or image_size is None:
        return None
    return "packed rows hold tokens and no images, so data.image_size has no use", "one of both", ""


def _windows_alone(value: Any, windows: int | None) -> Problem:
    if windows is None or value is None:
        return None
    return "data.windows makes rows of its own, of tokens", "one of both", ""


def _strides(stride: int, windows: int | None) -> Problem:
    if windows is not None or stride == 1:
        return None
    return "it is between windows, and there are none", "data.windows, too", ""


def _numbers(form: str | None, windows: int | None) -> Problem:
    if windows is None and form in get_args(Numbers):
        return f"a stream of {form} has no rows until it is cut into windows", "data.windows, too", ""
    return None


def _numbers_mixed(mix: Sequence[Any] | None, windows: int | None) -> Problem:
    for number, source in enumerate(mix or ()):
        if found := _numbers(source.get("format"), windows):
            return f"source {number}: {found[0]}", found[1], found[2]
    return None


def _skipped_rows(on_error: str, pipeline: int, tensor: int, experts: int, sharded: str) -> Problem:
    if on_error == "stop" or (pipeline * tensor * experts == 1 and sharded != "full"):
        return None
    what = "data.on_error: skip needs the whole model in each worker; stages do not tell one another which rows fail"
    return what, "data.on_error: stop, or parallel.pipeline, tensor and experts: 1 and not sharded: full", ""


def _best(metric: str, evaluate: None) -> Problem:
    return f"{metric!r} needs an evaluation, and none is configured", "an `evaluate` group", ""


def _one_best(stops: str, better: str, kept: str, best: str) -> Problem:
    if (stops, better) == (kept, best):
        return None
    what = f"early_stop keeps the best state by {stops} ({better}), and checkpoint.keep_best by {kept} ({best})"
    return what, "the same metric and mode, or no checkpoint.keep_best", ""


def _profiled_within(profiled: Sequence[int], steps: int | None) -> Problem:
    if steps is None or step_range(profiled) or profiled[1] <= steps:
        return None
    return beyond_the_end(profiled, steps)


def beyond_the_end(profiled: Sequence[int], steps: int) -> tuple[str, str, str]:
    """Return that the steps to profile are not all among the steps of the job: what, expected, remedy."""
    what = f"{[*profiled]} ends after the job's last step: it has {steps:,} steps"
    return what, f"an end of at most {steps}", ""


_CHECKS: Sequence[tuple[tuple[str, ...], Callable[..., Problem]]] = (
    (("data.path", "data.dataset", "data.mix"), _training_source),
    (("epochs", "data.mix"), _mixed_length),
    (("data.format", "data.mix"), _mixed_format),
    (("data.format", "data.dataset"), _only_paths),
    (("data.prepare", "data.dataset"), _only_paths),
    (("data.batch_size", "data.shards"), _batch),
    (("data.collate", "parallel.pipeline", "parallel.tensor", "parallel.experts"), _packed),
    (("data.group_by_length", "data.dataset", "data.shuffle", "data.pack"), _grouped),
    (("data.pack", "data.collate"), _one_length),
    (("data.pack", "data.image_size"), _no_images),
    (("data.image_size", "data.windows"), _windows_alone),
    (("data.pack", "data.windows"), _windows_alone),
    (("data.stride", "data.windows"), _strides),
    (("data.windows", "data.collate"), _one_length),
    (("data.format", "data.windows"), _numbers),
    (("data.mix", "data.windows"), _numbers_mixed),
    (
        ("data.on_error", "parallel.pipeline", "parallel.tensor", "parallel.experts", "parallel.sharded"),
        _skipped_rows,
    ),
    (("steps", "epochs"), _length),
    (("workers.max", "workers.min"), parallel_checks.sizes),
    (
        ("workers.min", "data.shards", "parallel.pipeline", "parallel.tensor", "parallel.experts"),
        parallel_checks.shard_room,
    ),
    (("workers.max", "workers.min", "parallel.pipeline"), parallel_checks.one_replica),
    (("parallel.tensor", "parallel.schedule", "parallel.sharded", "compile"), parallel_checks.tensor),
    (("parallel.experts", "parallel.schedule", "parallel.sharded", "compile"), parallel_checks.experts),
    (("parallel.experts", "parallel.tensor"), parallel_checks.same_slices),
    (("parallel.partition", "parallel.pipeline", "parallel.schedule"), parallel_checks.partition),
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
            "parallel.experts",
        ),
        parallel_checks.holders,
    ),
    (("parallel.microbatches", "data.batch_size", "data.shards"), parallel_checks.microbatches),
    (("reduction", "data.shards"), _exact),
    (("compression", "reduction"), _compression),
    (("recompute", "parallel.schedule"), parallel_checks.recompute),
    (("compile", "parallel.schedule"), parallel_checks.compiled),
    (
        ("collective", "workers.gpus", "parallel.tensor", "parallel.experts", "reduction"),
        parallel_checks.collective,
    ),
    (("precision", "parallel.schedule", "workers.gpus"), parallel_checks.precision),
    (("checkpoint.keep_best.metric", "evaluate"), _best),
    (("early_stop.metric", "evaluate"), _best),
    (
        ("early_stop.metric", "early_stop.mode", "checkpoint.keep_best.metric", "checkpoint.keep_best.mode"),
        _one_best,
    ),
    (("evaluate.path", "evaluate.dataset"), one_place),
    (("profile.steps", "steps"), _profiled_within),
)
"""(keys, check of their values); an error is reported at the first key."""
