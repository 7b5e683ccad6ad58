"""Define every setting of a job, with its meaning, default and type: one definition for YAML and Python.

Those of `data` are in `job.data_settings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Annotated, Any, Literal

import yaml

from raytrain_plus.errors import InputError, JobError
from raytrain_plus.job import bounds
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.sameness import FREE, KEPT, Kept, differing
from raytrain_plus.job.setting_types import (
    Offload,
    Precision,
    Recompute,
    Setting,
    Sharded,
    fits,
    flatten,
    plain,
    settings_of,
    spell_type,
)
from raytrain_plus.job.value_checks import check_values, credentials_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """How many workers to use, and what Ray reserves for each."""

    min: Annotated[int, bounds.at_least(1, 1_000_000), FREE] = 1
    """Minimum number of workers. The run starts with at least this many, and waits while it has fewer. Default 1."""

    max: Annotated[int | None, FREE] = None
    """Maximum number of workers; the run grows to it while the cluster has room. Default None: the same as `min`."""

    spares: Annotated[int, bounds.at_least(0, 1_000_000), FREE] = 0
    """Warm spare workers that replace a lost worker at once. They are held back when the run grows, but not when it
    has fewer than `min` workers. Default 0."""

    standby: Annotated[bool, FREE] = True
    """Keep a process with all imports done on each node that has several workers, or on the run's only node, to replace
    a worker whose process dies. Default true. It takes about 0.3 GB of memory; without it a replacement takes seconds
    longer. GPU workers have none: Ray shows a GPU only to the process that was started for it. Nor has a node with one
    of several workers: the others train on meanwhile, and lose no CPU time to the new start."""

    cpus: Annotated[float, bounds.at_least(0, 1_000_000), FREE] = 1
    """Logical CPUs that Ray reserves for each worker; fractions are allowed. Default 1."""

    gpus: Annotated[float, bounds.one_device, FREE] = 0
    """GPUs that Ray reserves for each worker: 0 (the default: train on the CPU) or 1."""

    accelerator: Annotated[str | None, bounds.accelerator_type, FREE] = None
    """Ray's accelerator type that the node of each worker must have, such as `H100` or `A100`. Default None: any, but
    the GPUs of all workers must be of one model."""

    threads: Annotated[int, bounds.at_least(1, 1_000), KEPT] = 1
    """Threads that torch uses in each worker; default 1. The last bits of the results depend on it, so it cannot change
    when a run is resumed."""


Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How to divide the model into pipeline stages and slices, and a step into microbatches."""

    pipeline: Annotated[int, bounds.at_least(1, 1_000), FREE] = 1
    """Pipeline stages that the model's layers are partitioned into. Each stage runs on its own worker; together they
    form one model replica. Default 1: every worker holds the whole model."""

    tensor: Annotated[int, bounds.power_of_two, KEPT] = 1
    """Slices that the weights named in `Task.tensor` are cut into: a power of two, fixed for the life of the run.
    Default 1: none is cut.

    A stage's slices are hosted on as many workers, or on fewer (half of them, a quarter, ... one): with fewer workers
    than before, the number of replicas falls first, then that of the workers that share a stage, then that of stages.
    The result does not depend on who hosts them. A model that is also in stages must be declared in layers.
    """

    experts: Annotated[int, bounds.power_of_two, KEPT] = 1
    """Slices that the experts of the model are divided into: a power of two, fixed for the life of the run. Default 1:
    each worker of a stage holds all of them.

    They are those of `layers.Experts`, and those that `Task.tensor` names. The workers of a stage host them as those of
    `tensor`; with both, the numbers must be equal.
    """

    schedule: Annotated[Schedule, Kept.WITH_PIPEDREAM] = "1f1b"
    """Order in which the stages of a replica make their forward and backward passes. Default `1f1b`.

    `gpipe`; `1f1b`; `interleaved`: two chunks of layers per stage; `zero-bubble`: two chunks per stage, and backward
    passes in two parts; `pipedream`: steps overlap without a bubble, and gradients belong to weights that are some
    microbatches old.
    """

    partition: Annotated[Sequence[str] | None, Kept.WITH_PIPEDREAM] = None
    """Names of the first layer of each chunk, in the order of the model: one for each stage, or two with `interleaved`
    and `zero-bubble`. Default None: the platform partitions the layers.

    The names are those of `Task.layers()`, or the numbers of an `nn.Sequential` in quotes: `["0", "3"]`. With fewer
    stages, after losses, the platform partitions the layers.
    """

    commit_every: Annotated[int, bounds.at_least(1, 10_000), Kept.WITH_PIPEDREAM] = 16
    """Steps after which all stages synchronize and commit these steps together. Default 16; only for `pipedream`."""

    microbatches: Annotated[int, bounds.at_least(1, 10_000), KEPT] = 1
    """Microbatches that each shard's rows of a step are split into. Must divide `batch_size / shards`. Default 1."""

    sharded: Annotated[Sharded, FREE] = "none"
    """What each worker holds in part, to save memory. Default `none`: every worker holds the whole training state.

    `optimizer` (ZeRO stage 1): each worker holds the optimizer's state of some rows of the weights, changes these rows
    and sends them to the others. The result does not depend on it. With Adam and N workers, a worker's optimizer needs
    8 bytes for each parameter times `holders` / N. In stages, the workers that hold the same stage share its rows.

    `full` (ZeRO stage 3): the weights and their gradients, too. Each layer is gathered before it computes, and its
    gradients are summed and divided after all microbatches have passed through it. A worker needs 16 bytes for each
    parameter times `holders` / N, and room for two layers with gradients. The model must be declared in layers, as for
    `pipeline`.
    """

    holders: Annotated[int, bounds.at_least(1), FREE] = 2
    """Workers that hold the state of each row of a weight, on different nodes if possible. Default 2; with `sharded`.

    With 2, the loss of one worker costs no step, nor does the next one, once that row has two holders again. If all
    holders of a row are lost at once, the run goes back to its newest checkpoint; with 1, after any loss.
    """

    @property
    def by_layer(self) -> bool:
        """Return whether no worker ever needs to hold the whole model."""
        return self.in_parts or self.sharded == "full"

    @property
    def in_parts(self) -> bool:
        """Return whether each worker holds a part of the model: some of its layers, or slices of them."""
        return self.width > 1

    @property
    def width(self) -> int:
        """Return the number of workers of a whole replica."""
        return self.pipeline * self.slices

    @property
    def slices(self) -> int:
        """Return the number of slices of weights, or of experts, that the workers of a stage host."""
        return max(self.tensor, self.experts)

    @property
    def in_one_stage(self) -> bool:
        """Return whether layers are cut into slices, but the model is not partitioned into stages."""
        return self.slices > 1 and self.pipeline == 1

    @property
    def overlaps(self) -> bool:
        """Return whether a stage starts a step before all stages have finished the previous one."""
        return self.schedule == "pipedream"

    @property
    def steps_together(self) -> int:
        """Return the number of steps that are committed together."""
        return self.commit_every if self.overlaps else 1

    def first_layers(self, stages: int) -> Sequence[str] | None:
        """Return the first layer of each chunk if `partition` names them for `stages` stages."""
        return self.partition if stages == self.pipeline else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """Timeouts, and how the run reacts to failures."""

    hang_timeout_s: Annotated[float, bounds.seconds, FREE] = 30.0
    """Seconds without progress after which a worker counts as hung and is removed from the group. Default 30; a
    worker's first step and evaluations have 300 s."""

    max_failures: Annotated[int | None, bounds.at_least(0), FREE] = None
    """Failures that the run survives; one more ends it. Default None: no limit. Ten failures in a row without a step
    in between always end the run."""

    wait_s: Annotated[float, bounds.seconds, FREE] = 60.0
    """Maximum seconds to wait until the run has the workers it needs; then it fails. Default 60."""

    copy_every: Annotated[int, bounds.at_least(1), FREE] = 1
    """Steps between two copies of the state that only one worker holds into another worker's memory. Default 1;
    higher values cost less time, but more steps are recomputed if that worker is lost."""

    stop_grace_s: Annotated[float, bounds.seconds, FREE] = 3.0
    """Seconds that a stopped run has to reach a step boundary; a step that would take longer is dropped. Default 3.
    Saving the state after that lasts as long as its writes advance."""

    on_nonfinite: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """What to do when the loss or gradient of a step is not finite; the step is never applied.

    `stop` (the default) ends the run and names the shard and the parameter. `skip` consumes the rows of the step and
    changes nothing; the tenth such step in a row ends the run.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepBest:
    """Which evaluation metric decides the best checkpoint."""

    metric: str
    """Name of a metric that `Task.evaluate` returns; decides which checkpoint is the best. Required."""

    mode: Literal["min", "max"] = "min"
    """Whether the lowest (`min`, the default) or the highest (`max`) value of `metric` is the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When checkpoints are written. One is always written at the end of a run, and when the run is stopped."""

    every_steps: Annotated[int | None, bounds.at_least(1), FREE] = None
    """Steps between checkpoints. Default None: checkpoints do not depend on the step number."""

    every_s: Annotated[float | None, bounds.seconds, FREE] = 600.0
    """Maximum seconds between checkpoints. Default 600; None disables the timer."""

    keep: Annotated[int, bounds.at_least(1), FREE] = 3
    """Number of newest checkpoints to keep; older ones are deleted. Default 3."""

    keep_best: Annotated[KeepBest | None, FREE] = None
    """Also keep the best checkpoint, and write one after every evaluation. Default None: keep only the newest.

    The best state so far is written before the next step. Other evaluations do not wait.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Evaluation on held-out rows."""

    path: Annotated[str | None, bounds.address] = None
    """File, folder or pattern with held-out rows, as `data.path`, with the same columns. Give exactly one of `path` and
    `dataset`."""

    dataset: Annotated[str | None, bounds.import_path] = None
    """`module:function` that returns the held-out rows, as `data.dataset`."""

    every_steps: Annotated[int, bounds.at_least(1)]
    """Steps between evaluations; required. The run also evaluates before the first and after the last step."""

    batches: Annotated[int | None, bounds.at_least(1)] = None
    """How many batches of `data.batch_size` rows an evaluation uses, drawn by `seed`: the same ones each time, on any
    number of workers. Default None, or more than there are: all held-out rows.

    They are drawn as those of a training epoch are: each shard takes rows of a few row groups, or from anywhere in a
    dataset that is read by index or in `windows`.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Ema:
    """The moving average of the weights."""

    decay: Annotated[float, bounds.share]
    """Share of the old average in the new one, above 0 and below 1, such as 0.999. Required."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop:
    """When a run ends because it no longer improves on its held-out rows."""

    metric: str
    """Name of a metric that `Task.evaluate` or `Task.summarise` returns. Required."""

    mode: Literal["min", "max"] = "min"
    """Whether the lowest (`min`, the default) or the highest (`max`) value of `metric` is the best."""

    patience: Annotated[int, bounds.at_least(1)]
    """Evaluations in a row without a better value than before, after which the run ends. Required.

    Every best state is saved, and kept, as with `checkpoint.keep_best`. At the end, `model.safetensors` is the best
    state. The evaluation before the first step does not count.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Which steps to profile, and on how many workers."""

    steps: Annotated[Sequence[int], bounds.step_range]
    """`[first, end]`: the steps from `first` up to, but not including, `end`, as in a range. Required. Steps are
    counted from 0, as in events.

    Each profiled worker writes a trace into `profile/` of the run's folder. The summary and `profile/summary.json` say
    how long forward and backward passes, sums, optimizer and data took, and the MFU. These steps are slower.
    """

    workers: Annotated[int, bounds.at_least(1)] = 1
    """How many workers are profiled, by seat: the first ones. Default 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training job. Raises `JobError` with every problem found if a value is wrong or values contradict."""

    name: Annotated[str, bounds.run_name, FREE]
    """Name of the run and of its folder inside `storage`: letters, digits, dot, dash, underscore.

    Required in Python. In a job file it defaults to the name of that file without its suffix.
    """

    task: Annotated[str | type, bounds.import_path, KEPT]
    """`module:Class` of the `Task`, or `module:function` of a training loop; in Python also either itself. Required.

    It is imported from the working directory, then from the folder of the job file.
    """

    args: Annotated[Mapping[str, Any], Kept.UNLESS_RESUMED] = field(default_factory=dict)
    """Keyword arguments of the task's constructor; none by default. `${env:NAME}` in a text stands for an environment
    variable."""

    seed: Annotated[int, KEPT] = 0
    """Seed of the initial weights, all random numbers and the sample order. Default 0."""

    data: Data
    """Training data: where it is, and how it is shuffled, batched and transformed. Required."""

    steps: Annotated[int | None, bounds.at_least(1), Kept.UNLESS_RESUMED] = None
    """Length of the training in optimizer steps. Give exactly one of `steps` and `epochs`."""

    epochs: Annotated[int | None, bounds.at_least(1), KEPT] = None
    """Length of the training in passes over the data. Give exactly one of `steps` and `epochs`."""

    workers: Workers = field(default_factory=Workers)
    """Number of workers, and the resources of each."""

    parallel: Parallel = field(default_factory=Parallel)
    """How a step is divided into pipeline stages and microbatches."""

    collective: Annotated[Literal["auto", "horovod", "torch", "nccl"], FREE] = "auto"
    """Library that sums gradients. `auto` (the default): Horovod if it is built, otherwise `torch`, which is
    torch.distributed with Gloo. On GPUs both sum in pinned memory of the host, and are left as on CPUs when a worker is
    lost. `nccl`: GPUs exchange by NCCL, and through pinned memory while it forms again after a change."""

    reduction: Annotated[Literal["ring", "exact"], KEPT] = "ring"
    """How gradients are summed. `ring` (the default): a ring all-reduce; results differ by rounding with the number
    of workers. `exact`: gradients are first rounded to a common grid, so the result has the same bits on any number of
    workers and after any failure; it sends twice the bytes."""

    compression: Annotated[Literal["none", "fp16", "bf16"], KEPT] = "none"
    """Format in which gradients travel between workers. `none` (the default): their own. `fp16`, `bf16`: 16 bits a
    number, half the bytes of float32; they are added in float32, but each gradient is rounded twice on its way. `fp16`
    has more digits, but values more than 2^40 times smaller than the largest one sent with them become zero, which the
    run reports."""

    precision: Annotated[Precision, KEPT] = "fp32"
    """Format of the numbers in forward and backward passes; weights, gradient sums and optimizer are float32 in all.

    `fp32` (the default): the model's own. `tf32`: float32 with 10 bits of mantissa in matrix products, on GPUs of
    NVIDIA's Ampere generation and later. `bf16`, `fp16`: `torch.autocast` around the loss and the evaluation, also on
    CPUs; `fp16` scales the loss, and a step whose gradients overflow is computed again with half the scale.
    `bf16-params`: as `bf16`, and the model holds bfloat16 copies of its trained weights of two or more dimensions, so
    that no pass converts them. Exported weights are float32, or rounded, by `--dtype bf16` of `raytrain export`.
    """

    recompute: Annotated[Recompute, Kept.WITH_COMPILE] = "none"
    """Layers that keep only their input for the backward pass, and are computed again in it, to save memory (activation
    checkpointing). `none` (the default), `full` (all) or a list of layer names; or `selective`: all, but the results of
    matrix products, convolutions and attention are kept, too. The result has the same bits."""

    offload: Annotated[Offload, Kept.ON_GPUS] = "none"
    """What of the training state is in the host's memory, not in the GPU's. `none` (the default): nothing.

    `optimizer`: the optimizer runs on the CPU, with its state and the weights that it changes; the GPU keeps the
    weights with which it computes, and gradients. It saves 8 bytes for each parameter with Adam, and 12 with
    `precision: bf16-params`, and takes longer: gradients go to the host and weights come back in every step. An
    optimizer with `fused=True` is the fastest there. Together with `sharded`, each worker does so with its rows. The
    results differ from those without it in the last bits on GPUs, where a run keeps this setting.
    """

    ema: Annotated[Ema | None, KEPT] = None
    """Exponential moving average of the weights, which evaluations and the exported model use. Default None: none."""

    compile: Annotated[bool, KEPT] = False
    """Whether `torch.compile` compiles each layer's forward and backward pass; a model that does not declare its layers
    is compiled whole. Default false. Each shape of a microbatch is compiled once, before the worker joins."""

    clip_value: Annotated[float | None, bounds.above_zero, KEPT] = None
    """Maximum magnitude of each element of the gradient, or of both parts of a complex one; larger ones are clamped to
    it, before `clip_norm`. Default None: no clamping."""

    clip_norm: Annotated[float | None, bounds.above_zero, KEPT] = None
    """Maximum global norm of the gradient; larger gradients are scaled down to it. Default None: no clipping."""

    elastic: Elastic = field(default_factory=Elastic)
    """Timeouts, and how the run reacts to failures."""

    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """When checkpoints are written to `storage`, and how many are kept."""

    evaluate: Annotated[Evaluate | None, FREE] = None
    """Evaluation on held-out rows. Default None: no evaluation."""

    early_stop: Annotated[EarlyStop | None, Kept.UNLESS_RESUMED] = None
    """When to end because the run no longer improves. Default None: the run makes all its steps."""

    trackers: Annotated[Sequence[str], bounds.trackers, FREE] = field(default_factory=list)
    """Experiment trackers that get the run's metrics, in addition to TensorBoard: `mlflow`, `wandb`. Default: none.

    The destination and credentials come from each tracker's usual environment variables, such as MLFLOW_TRACKING_URI
    and WANDB_PROJECT.
    """

    profile: Annotated[Profile | None, FREE] = None
    """Which steps to profile. Default None: no step is profiled."""

    storage: Annotated[str, bounds.address, FREE] = "runs"
    """Folder in which the run's folder is created: a path, or an address such as `s3://bucket/runs`.

    Default `runs`. An address can carry pyarrow's settings (`?region=eu-west-1`). An address that contains a
    credential is refused, here and in every other setting: credentials come from the environment.
    """

    def __post_init__(self) -> None:
        if isinstance(self.task, FunctionType):
            # Imported here because it loads torch, as a function of a session has.
            from raytrain_plus.session.session_task import session_task

            object.__setattr__(self, "task", session_task(self.task))
        values = dict(flatten(self))
        wrong = {key: found for key, value in values.items() if (found := check_type(key, value)) is not None}
        right = {key: value for key, value in values.items() if key not in wrong}
        problems = [*wrong.values(), *(problem for pair in right.items() for problem in check_value(*pair))]
        problems += check_values(right)
        if problems:
            raise JobError(problems)

    @property
    def best(self) -> EarlyStop | KeepBest | None:
        """The setting whose metric decides the best checkpoint: `early_stop`, else `checkpoint.keep_best`."""
        return self.early_stop or self.checkpoint.keep_best

    def to_yaml(self) -> str:
        """Return the job as YAML with every setting spelled out, which loads back as an equal job.

        A task given as a class is written as `module:Class`.
        """
        values = plain(self)
        if not isinstance(self.task, str):
            values["task"] = f"{self.task.__module__}:{self.task.__qualname__}"
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

    def same_as(self, resolved: str, *, resumes: bool = False) -> list[str]:
        """Return the keys that make this job another one than `resolved`, the text of a `job.yaml`.

        `resumes`: whether this job resumes a run of that one. The keys that count are those of `job.sameness`.
        """
        return differing(Job, yaml.safe_load(self.to_yaml()), yaml.safe_load(resolved), resumes=resumes)


def setting_of(key: str) -> Setting:
    """Return what the field of a dotted key says. Raises `KeyError` if the setting does not exist."""
    *groups, name = key.split(".")
    cls: type = Job
    for part in groups:
        group = settings_of(cls)[part].group
        if group is None:
            raise KeyError(key)
        cls = group
    return settings_of(cls)[name]


def check_type(key: str, value: Any) -> InputError | None:
    """Return what is wrong with the type of one setting, or None."""
    setting = setting_of(key)
    if setting.group is not None:
        if value is None and fits(value, setting.hint):
            return None
        first = f"{key}.{next(iter(settings_of(setting.group)))}"
        wrong = _wrong_type(key, value, f"a group of settings, such as {first}")
        if key == "workers" and fits(value, int):
            wrong = InputError(wrong.what, wrong.where, wrong.expected, f"workers={{min: {value}, max: {value}}}")
        return wrong
    return None if fits(value, setting.hint) else _wrong_type(key, value, spell_type(setting.hint))


def check_value(key: str, value: Any) -> list[InputError]:
    """Return what is wrong with the value of one setting alone, whose type is right: credentials in it, its bounds."""
    setting = setting_of(key)
    problems = list(credentials_in(value, key))
    if problem := setting.problem(value):
        problems.append(InputError(problem[0], where=key, expected=problem[1], remedy=problem[2]))
    return problems


def _wrong_type(key: str, value: Any, expected: str) -> InputError:
    got = f"{value!r}" if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return InputError(f"{got} is not allowed", where=key, expected=expected)
