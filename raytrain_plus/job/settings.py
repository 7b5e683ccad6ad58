"""Every setting of a job: its name, its meaning, its check. YAML and Python are one definition."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from raytrain_plus.credentials import REMEDY, credential_in
from raytrain_plus.errors import InputError, JobError
from raytrain_plus.storage.address import SCHEMES, is_address


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    path: str
    """A Parquet file or a folder of them (searched recursively). Relative paths start at the working directory."""

    prepare: str | None = None
    """`module:function` that writes the data where `path` is missing, called as function(folder, name).

    `folder` is empty and becomes `path`, `name` is its last part; once per node, the same bytes everywhere.
    """

    batch_size: int
    """Rows in the global batch of one step: a multiple of `shards`."""

    shards: int = 8
    """Logical shares of every global batch, for the job's life; bounds the useful number of workers."""

    shuffle: Literal["none", "units", "rows"] = "rows"
    """What an epoch permutes: nothing, the order of row groups, or that and the rows inside each."""

    transform: str | None = None
    """`module:function(table, rng)` applied to granules of rows before batching; keeps the number of rows, and bears
    being called from two threads, or two processes, at once."""

    granule: int = 1024
    """Rows that `transform` sees at once, at most."""

    cache_mb: int = 256
    """Megabytes of decoded row groups that a worker may keep in memory over epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    min: int = 1
    """The run starts with at least so many workers, and waits when it has fewer."""

    max: int | None = None
    """At most so many workers, as the cluster has room; `min` where it is not given."""

    spares: int = 0
    """Warm workers beside the group, ready to take a lost one's place: held back from growth, never from `min`."""

    cpus: float = 1
    """Logical CPUs that Ray reserves for a worker."""

    gpus: float = 0
    """GPUs that Ray reserves for a worker: 0 or 1."""

    threads: int = 1
    """Threads that torch uses inside a worker. Part of the job, because results depend on it in the last bits."""


Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    pipeline: int = 1
    """Stages that the model's layers are cut into, each on a worker of its own; together they are a cell."""

    schedule: Schedule = "1f1b"
    """In which order a cell's stages make their forward and backward passes: `gpipe`, `1f1b`, `interleaved` (two chunks
    of layers a stage), `zero-bubble` (two chunks, and backward passes in two parts), `pipedream` (steps overlap: no
    bubble between them, and gradients of weights that are some microbatches old)."""

    commit_every: int = 16
    """Under `pipedream`, the steps after which all stages come together; these are committed together."""

    microbatches: int = 1
    """Parts in which a shard's rows of a step pass through the model; divides `batch_size / shards`."""

    @property
    def overlaps(self) -> bool:
        """Whether a stage begins with a step before all stages have done with the one before."""
        return self.schedule == "pipedream"

    @property
    def steps_together(self) -> int:
        """The steps that are committed together."""
        return self.commit_every if self.overlaps else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    hang_timeout_s: float = 30.0
    """Seconds without a sign of progress after which a worker is hung; a first step and evaluations have 300."""

    max_failures: int | None = None
    """Failures that a run survives; None for any number. Ten in a row with no step between them always end it."""

    wait_s: float = 60.0
    """Seconds to wait for the workers that a run needs before it gives up."""

    copy_every: int = 1
    """Steps between two copies of state that one worker alone holds into another's memory."""

    stop_grace_s: float = 3.0
    """Seconds that a stopped run has to come to a step boundary and save its result."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What follows a step whose loss or gradient is not finite: `stop` ends the run and names the shard and the
    parameter; `skip` uses up its rows and changes nothing, up to ten steps in a row. Neither applies the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepBest:
    metric: str
    """A figure that `Task.evaluate` returns."""

    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest is the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """There is one at the end of a run and when it is stopped, in any case."""

    every_steps: int | None = None
    """Steps between checkpoints."""

    every_s: float | None = 600.0
    """Seconds after which there is one, if there was none; None for no such limit."""

    keep: int = 3
    """How many are kept, the newest ones."""

    keep_best: KeepBest | None = None
    """Keeps the best one, too; with it there is one after every evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    path: str
    """Held-out Parquet file or folder, with the columns of `data.path`."""

    every_steps: int
    """Steps between evaluations; there is one before the first step and one after the last, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training job. Raises `JobError`, with every problem found, where the values do not fit together."""

    name: str
    """The run's name and folder: letters, digits, dot, dash, underscore. In a file: its stem unless given."""

    task: str | type
    """`module:Class` of a `Task`, looked up from the working directory; from Python also the class itself."""

    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task's constructor."""

    seed: int = 0
    """Seeds weights, random keys and the order of the data."""

    data: Data
    """The rows to train on."""

    steps: int | None = None
    """Optimizer steps to make; either this or `epochs`."""

    epochs: int | None = None
    """Passes over the data to make; either this or `steps`."""

    workers: Workers = field(default_factory=Workers)
    """How many workers, and what each needs."""

    parallel: Parallel = field(default_factory=Parallel)
    """How a step is divided."""

    collective: Literal["auto", "horovod", "torch"] = "auto"
    """The library that sums gradients. `auto`: Horovod where it is really built, else torch.distributed."""

    reduction: Literal["ring", "exact"] = "ring"
    """How gradients are summed. `exact`: rounded to a common grid first, so that the result has the same bits on any
    number of workers and through any failure; twice the bytes."""

    clip_norm: float | None = None
    """Largest global norm of the gradient; None leaves it alone."""

    elastic: Elastic = field(default_factory=Elastic)
    """How long to wait for what."""

    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """When the state is written to `storage`, and how much of it is kept."""

    evaluate: Evaluate | None = None
    """Held-out evaluation, if any."""

    trackers: Sequence[str] = field(default_factory=list)
    """Who is told the run's figures beside TensorBoard: `mlflow`, `wandb`. Where they are, and what they need to be let
    in, the environment says: MLFLOW_TRACKING_URI, WANDB_PROJECT and their like, as their own libraries read them."""

    storage: str = "runs"
    """The folder in which the run's folder is made: a path, or an address such as `s3://bucket/runs`.

    An address holds settings as pyarrow takes them (`?region=eu-west-1`). Here as in every other setting, an address
    with a credential in it is refused: credentials come from the environment.
    """

    def __post_init__(self) -> None:
        values = dict(flatten(self))
        problems = [problem for key, value in values.items() if (problem := check_type(key, value)) is not None]
        wrong = {problem.where for problem in problems}
        problems += check_values({key: value for key, value in values.items() if key not in wrong})
        if problems:
            raise JobError(problems)

    def to_yaml(self) -> str:
        """The job with every setting spelled out; loads back equal. A task given as a class is named `module:Class`."""
        values = _plain(self)
        if not isinstance(self.task, str):
            values["task"] = f"{self.task.__module__}:{self.task.__qualname__}"
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

    def same_as(self, resolved: str) -> list[str]:
        """The keys in which this job differs from the one that a `job.yaml` says, of those that make a job the same."""
        mine, theirs = yaml.safe_load(self.to_yaml()), yaml.safe_load(resolved)
        return [key for key in _SAME if _at(mine, key) != _at(theirs, key)]


_SAME = (
    "task",
    "args",
    "seed",
    *(f"data.{name}" for name in ("path", "batch_size", "shards", "shuffle", "transform", "granule")),
    "steps",
    "epochs",
    "workers.threads",
    "parallel.microbatches",
    "reduction",
    "clip_norm",
)
"""What makes two jobs the same: all that the result depends on."""


@functools.cache
def fields_of(cls: type) -> Mapping[str, tuple[Any, bool]]:
    """The settings of one level: name -> (type, whether it must be given)."""
    hints = get_type_hints(cls)
    return {
        entry.name: (hints[entry.name], entry.default is MISSING and entry.default_factory is MISSING)
        for entry in dataclasses.fields(cls)
    }


def nested(hint: Any) -> type | None:
    """The dataclass that a setting holds, if it holds one."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)  # type: ignore[return-value]


def flatten(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted key; groups that are not given are left out."""
    for entry in dataclasses.fields(settings):
        value = getattr(settings, entry.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from flatten(value, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", value


def hint_of(key: str) -> Any:
    """The type of a dotted key; raises KeyError where there is no such setting."""
    cls: type | None = Job
    hint: Any = Job
    for part in key.split("."):
        if cls is None:
            raise KeyError(key)
        hint = fields_of(cls)[part][0]
        cls = nested(hint)
    return hint


def check_type(key: str, value: Any) -> InputError | None:
    """What is wrong with the type of one setting, if anything."""
    hint = hint_of(key)
    if nested(hint) is not None:
        return (
            None if value is None and type(None) in get_args(hint) else _wrong_type(key, value, "a group of settings")
        )
    if _fits(value, hint):
        return None
    return _wrong_type(key, value, spell_type(hint))


def _wrong_type(key: str, value: Any, expected: str) -> InputError:
    got = f"{value!r}" if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return InputError(f"{got} is not allowed", where=key, expected=expected)


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if origin is Sequence:
        return isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def spell_type(hint: Any) -> str:
    """A setting's type in words."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(spell_type(option) for option in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(str(option) for option in get_args(hint))
    if origin is Mapping:
        return "a mapping with words as keys"
    if origin is Sequence:
        return "a list of words"
    return {float: "a number", int: "a whole number", str: "text", type(None): "nothing", type: "a class"}[hint]


def check_values(values: Mapping[str, Any]) -> list[InputError]:
    """What is wrong with settings whose types are right; a check whose settings are not all there is left out."""
    problems = [problem for key, value in values.items() for problem in _credentials(value, key)]
    for keys, check in _CHECKS:
        if all(key in values for key in keys):
            problem = check(*(values[key] for key in keys))
            if problem is not None:
                problems.append(InputError(problem[0], where=keys[0], expected=problem[1], remedy=problem[2]))
    return problems


def _credentials(value: Any, key: str) -> Iterator[InputError]:
    """Find addresses with credentials in a setting: it is written to the run's folder and shown in many places."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _credentials(name, key)
            yield from _credentials(one, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from _credentials(one, f"{key}[{place}]")
    elif isinstance(value, str) and (part := credential_in(value)):
        reference = "; or refer to a variable, as in ${env:NAME}" * key.startswith("args")
        yield InputError(f"the address contains a credential: {part}", where=key, remedy=f"{REMEDY}{reference}")


_Problem = tuple[str, str, str] | None


def _name(name: str) -> _Problem:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        return None
    why = "has a path in it" if "/" in name or "\\" in name else "is no name"
    return (
        f"{name!r} {why}",
        "letters, digits, '.', '_' and '-', a letter or digit first",
        "the folder goes into `storage`",
    )


MOST = 10**9
"""Of whatever is counted, or waited for in seconds: more is a mistake, and overflows 64 bits or a clock somewhere."""


def _at_least(lowest: float, highest: float = MOST) -> Callable[[float | None], _Problem]:
    def check(value: float | None) -> _Problem:
        if value is None or (math.isfinite(value) and lowest <= value <= highest):
            return None
        bound = f"at most {highest:,}" if value > highest else f"{lowest:g} or more"
        return f"{value} is not allowed", bound, ""

    return check


def _above_zero(value: float | None) -> _Problem:
    if value is None or (math.isfinite(value) and value > 0):
        return None
    return f"{value} is not allowed", "a number above 0", ""


def _seconds(value: float | None) -> _Problem:
    if value is None or value <= MOST:
        return _above_zero(value)
    return f"{value} is not allowed", f"at most {MOST:,} seconds", ""


def _batch(batch_size: int, shards: int) -> _Problem:
    if shards < 1 or batch_size < 1 or batch_size % shards == 0:
        return None
    below = batch_size // shards * shards
    nearest = " or ".join(str(value) for value in (below, below + shards) if value)
    return (
        f"{batch_size} is no multiple of data.shards = {shards}",
        f"{nearest}, say",
        "every shard gives every step as many rows",
    )


def _microbatches(microbatches: int, batch_size: int, shards: int) -> _Problem:
    if min(microbatches, batch_size, shards) < 1 or batch_size % shards or batch_size // shards % microbatches == 0:
        return None
    rows = batch_size // shards
    return f"{microbatches} does not divide the {rows} rows that a shard gives to a step", f"a divisor of {rows}", ""


def _length(steps: int | None, epochs: int | None) -> _Problem:
    if (steps is None) != (epochs is None):
        return None
    given = "neither `steps` nor `epochs` is given" if steps is None else "both `steps` and `epochs` are given"
    return given, "exactly one of them", ""


def _sizes(maximum: int | None, minimum: int) -> _Problem:
    if maximum is None or maximum >= minimum:
        return None
    return f"{maximum} is less than workers.min = {minimum}", f"{minimum} or more", ""


def _shard_room(minimum: int, shards: int, pipeline: int) -> _Problem:
    if minimum <= shards * pipeline:
        return None
    of = "" if pipeline == 1 else f" and parallel.pipeline = {pipeline}"
    return (
        f"{minimum} workers for data.shards = {shards}{of}: some would have nothing to do",
        f"at most {shards * pipeline}",
        "raise data.shards",
    )


def _one_cell(maximum: int | None, minimum: int, pipeline: int) -> _Problem:
    most = minimum if maximum is None else maximum
    if most >= pipeline:
        return None
    return f"{most} workers are fewer than the {pipeline} stages of parallel.pipeline", f"{pipeline} or more", ""


def _pipedream(
    schedule: str, pipeline: int, reduction: str, clip_norm: float | None, minimum: int, on_nonfinite: str
) -> _Problem:
    if schedule != "pipedream":
        return None
    if pipeline == 1:
        return "pipedream is a schedule of stages, and there is one", "parallel.pipeline of 2 or more", ""
    if reduction == "exact":
        what = "what it makes of a step depends on how far each stage is; reduction: exact cannot go with it"
        return what, "reduction: ring, or another schedule", ""
    if clip_norm is not None:
        what = "clip_norm needs the gradients of all stages at one step, and pipedream's stages are at different ones"
        return what, "no clip_norm, or another schedule", ""
    if on_nonfinite == "skip":
        what = "on_nonfinite: skip needs all stages to leave a step out together; pipedream's apply it one by one"
        return what, "on_nonfinite: stop, or another schedule", ""
    if minimum < pipeline:
        what = f"with workers.min = {minimum} the model would be cut anew in the run, which pipedream does not bear"
        return what, f"workers.min of at least parallel.pipeline = {pipeline}", ""
    return None


EXACT_SHARDS = 4096
"""With more of them the grid of `reduction: exact` would have to be coarser than float32 is."""


def _exact(reduction: str, shards: int) -> _Problem:
    if reduction != "exact" or shards <= EXACT_SHARDS:
        return None
    return f"data.shards = {shards} is more than an exact sum holds", f"at most {EXACT_SHARDS} shards", ""


def _gpus(gpus: float) -> _Problem:
    return None if gpus in (0, 1) else (f"{gpus:g} is not allowed", "0 or 1: a worker trains on one device", "")


def _reference(spec: str | type | None) -> _Problem:
    if not isinstance(spec, str) or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", spec):
        return None
    return f"{spec!r} names nothing that can be imported", "module:name, as in examples.digits:Digits", ""


def _best(metric: str, evaluate: None) -> _Problem:
    return f"nothing is evaluated that {metric!r} could be", "an `evaluate` group", ""


def _folder(storage: str) -> _Problem:
    scheme = storage.partition("://")[0]
    if not is_address(storage) or scheme in SCHEMES:
        return None
    # Not the whole address: it may hold a password.
    return f"nothing is known of '{scheme}://...'", f"a path, or {', '.join(f'{known}://' for known in SCHEMES)}", ""


TRACKERS = ("mlflow", "wandb")
"""By the names of their packages."""


def _trackers(names: Sequence[str]) -> _Problem:
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        there = f"{' and '.join(TRACKERS)}; TensorBoard's files are written in any case"
        near = difflib.get_close_matches(unknown[0], TRACKERS, 1)
        return f"there is no tracker {unknown[0]!r}", there, f"did you mean '{near[0]}'?" if near else ""
    return ("one is named twice", "each once", "") if len(set(names)) < len(names) else None


_CHECKS: Sequence[tuple[tuple[str, ...], Callable[..., _Problem]]] = (
    (("name",), _name),
    (("task",), _reference),
    (("data.batch_size",), _at_least(1)),
    (("data.shards",), _at_least(1, 100_000)),
    (("data.batch_size", "data.shards"), _batch),
    (("data.prepare",), _reference),
    (("data.transform",), _reference),
    (("data.granule",), _at_least(1)),
    (("data.cache_mb",), _at_least(0)),
    (("steps",), _at_least(1)),
    (("epochs",), _at_least(1)),
    (("steps", "epochs"), _length),
    (("workers.min",), _at_least(1, 1_000_000)),
    (("workers.max", "workers.min"), _sizes),
    (("workers.min", "data.shards", "parallel.pipeline"), _shard_room),
    (("workers.max", "workers.min", "parallel.pipeline"), _one_cell),
    (("parallel.pipeline",), _at_least(1, 1_000)),
    (("workers.spares",), _at_least(0, 1_000_000)),
    (("workers.cpus",), _at_least(0, 1_000_000)),
    (("workers.gpus",), _gpus),
    (("workers.threads",), _at_least(1, 1_000)),
    (("parallel.microbatches",), _at_least(1, 10_000)),
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
        _pipedream,
    ),
    (("parallel.microbatches", "data.batch_size", "data.shards"), _microbatches),
    (("reduction", "data.shards"), _exact),
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
    (("evaluate.every_steps",), _at_least(1)),
    (("trackers",), _trackers),
    (("storage",), _folder),
)
"""(keys, check of their values); the first key is the one at fault."""


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values
