"""Decide whether two jobs are the same: which settings must agree, because the result depends on them. Pure.

Each setting says at its field whether a run keeps it. A `job.yaml` that lacks a setting is older than it, and means its
default, so the default of a setting that is kept never changes. Results can also depend on `collective` and
`elastic.on_nonfinite`, which may change. Data is compared by its fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any

from raytrain_plus.job.setting_types import settings_of


class Kept(Enum):
    """Whether a setting stays as it is for the life of a run."""

    ALWAYS = auto()
    UNLESS_RESUMED = auto()
    """`resume` may change it."""
    WITH_PIPEDREAM = auto()
    """If one of two jobs uses pipedream, which computes gradients with older weights."""
    WITH_COMPILE = auto()
    """If one of two jobs is compiled: the compiler makes other code for what is recomputed."""
    ON_GPUS = auto()
    """If one of two jobs uses GPUs, whose optimizers round otherwise than those of CPUs."""
    NEVER = auto()


KEPT, FREE = Kept.ALWAYS, Kept.NEVER


def differing(of: type, mine: Mapping[str, Any], theirs: Mapping[str, Any], *, resumes: bool = False) -> list[str]:
    """Return the keys that make one job another one than the other; both are the values of a `job.yaml`.

    `of`: the dataclass of all settings. `resumes`: whether one of them resumes the other.
    """
    kept = {Kept.ALWAYS, Kept.UNLESS_RESUMED} - ({Kept.UNLESS_RESUMED} if resumes else set())
    keys = {key: (how, default) for key, how, default in kept_settings(of)}

    def value(job: Any, key: str) -> Any:
        for part in key.split("."):
            job = job.get(part) if isinstance(job, Mapping) else None
        return keys[key][1] if job is None else job

    for job in (mine, theirs):
        kept |= {Kept.WITH_PIPEDREAM} if value(job, "parallel.schedule") == "pipedream" else set()
        kept |= {Kept.WITH_COMPILE} if value(job, "compile") else set()
        kept |= {Kept.ON_GPUS} if value(job, "workers.gpus") else set()
    return [key for key, (how, _) in keys.items() if how in kept and value(mine, key) != value(theirs, key)]


def kept_settings(of: type, prefix: str = "") -> Iterator[tuple[str, Kept | None, Any]]:
    """Yield (key, whether a run keeps it, default) of all settings; a group that says it itself is one of them."""
    for name, setting in settings_of(of).items():
        how = next((mark for mark in setting.marks if isinstance(mark, Kept)), None)
        if how is None and setting.group is not None:
            yield from kept_settings(setting.group, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", how, None if setting.required else setting.default
