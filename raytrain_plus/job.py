"""Every setting of a job: its name, its meaning, its check. YAML and Python are one definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    path: str
    """A Parquet file or a folder of them (searched recursively). Relative paths start at the working directory."""

    prepare: str | None = None
    """`module:function(path)` that writes the data where `path` is missing: once per node, the same bytes everywhere."""

    batch_size: int
    """Rows in the global batch of one step: a multiple of `shards`."""

    shards: int = 8
    """Logical shares of every global batch, for the job's life; bounds the useful number of workers."""

    shuffle: Literal["none", "units", "rows"] = "rows"
    """What an epoch permutes: nothing, the order of row groups, or that and the rows inside each."""

    transform: str | None = None
    """`module:function(table, rng)` applied to granules of rows before batching; keeps the number of rows."""

    granule: int = 1024
    """Rows that `transform` sees at once, at most."""

    cache_mb: int = 256
    """Megabytes of decoded row groups that a worker may keep in memory over epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    min: int = 1
    """The run starts with at least so many workers, and fails when it cannot have them."""

    max: int | None = None
    """At most so many workers; `min` where it is not given."""

    cpus: float = 1
    """Logical CPUs that Ray reserves for a worker."""

    gpus: float = 0
    """GPUs that Ray reserves for a worker: 0 or 1."""

    threads: int = 1
    """Threads that torch uses inside a worker. Part of the job, because results depend on it in the last bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    microbatches: int = 1
    """Parts in which a shard's rows of a step pass through the model; divides `batch_size / shards`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    hang_timeout_s: float = 30.0
    """Seconds without progress in a collective after which a run is hung."""

    wait_s: float = 60.0
    """Seconds to wait for the workers that a run needs before it gives up."""

    stop_grace_s: float = 10.0
    """Seconds that a stopped run has to come to a step boundary and save its result."""


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

    clip_norm: float | None = None
    """Largest global norm of the gradient; None leaves it alone."""

    elastic: Elastic = field(default_factory=Elastic)
    """How long to wait for what."""

    evaluate: Evaluate | None = None
    """Held-out evaluation, if any."""

    storage: str = "runs"
    """The folder in which the run's folder is made."""
