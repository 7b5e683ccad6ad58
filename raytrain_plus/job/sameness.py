"""Decide whether two jobs are the same: which settings must agree, because the result depends on them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAME = (
    "task",
    "args",
    "seed",
    *(f"data.{name}" for name in ("path", "dataset", "mix", "columns", "image_size", "batch_size")),
    *(f"data.{name}" for name in ("shards", "shuffle", "transform", "collate", "tokenizer", "pack", "granule")),
    "data.on_error",
    "steps",
    "epochs",
    "early_stop",
    "workers.threads",
    "parallel.microbatches",
    "parallel.tensor",
    "reduction",
    "compression",
    "precision",
    "compile",
    "ema",
    "clip_norm",
)
"""Keys that must agree for two jobs to be the same, because the result depends on them.

It can also depend on `collective` and `elastic.on_nonfinite`, which may change. Data is compared by its fingerprint.
"""
_SAME_WITH_PIPEDREAM = ("parallel.schedule", "parallel.partition", "parallel.commit_every")
"""Keys that must agree too if one of two jobs uses pipedream, which computes gradients with older weights."""
_SAME_WITH_COMPILE = ("recompute",)
"""Keys that must agree too if one of two jobs is compiled: the compiler makes other code for what is recomputed."""
_SAME_ON_GPUS = ("offload",)
"""Keys that must agree too if one of two jobs uses GPUs, whose optimizers round otherwise than those of CPUs."""
_BEFORE = {
    "data.image_size": None,
    "data.collate": None,
    "data.dataset": None,
    "data.mix": None,
    "data.columns": None,
    "data.tokenizer": None,
    "data.pack": None,
    "data.on_error": "stop",
    "early_stop": None,
    "compression": "none",
    "precision": "fp32",
    "compile": False,
    "ema": None,
    "recompute": "none",
    "offload": "none",
    "parallel.tensor": 1,
    "parallel.schedule": "1f1b",
    # Theirs was timed. Checkpoints fit every partition, so their runs resume with the counted one.
    "parallel.partition": None,
    "parallel.commit_every": 16,
}
"""Those of all these keys that older versions did not write, and what these versions did."""


def differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the keys that make one job another one than the other; both are the values of a `job.yaml`.

    The keys are those of `_SAME`, and those of `_SAME_WITH_PIPEDREAM`, `_SAME_WITH_COMPILE` and `_SAME_ON_GPUS` if
    either job uses these.
    """
    overlap = any(_kept(job, "parallel.schedule") == "pipedream" for job in (mine, theirs))
    compiled = any(_kept(job, "compile") for job in (mine, theirs))
    on_gpus = any(_kept(job, "workers.gpus") for job in (mine, theirs))
    keys = [*_SAME]
    keys += _SAME_WITH_PIPEDREAM if overlap else ()
    keys += _SAME_WITH_COMPILE if compiled else ()
    keys += _SAME_ON_GPUS if on_gpus else ()
    return [key for key in keys if _kept(mine, key) != _kept(theirs, key)]


def _kept(values: Any, key: str) -> Any:
    """Return the value of one of these keys in the values of a `job.yaml`."""
    value = _at(values, key)
    return _BEFORE.get(key) if value is None else value


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values
