"""Execute a Trainer script with settings given beside it, as `raytrain run SCRIPT.py --set workers.max=3` does."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml

from raytrain_plus.errors import InputError
from raytrain_plus.job.yaml import value_of

_GIVEN: ContextVar[tuple[str, ...]] = ContextVar("overrides of a script", default=())


def run_script(file: Path, overrides: Sequence[str], arguments: Sequence[str]) -> None:
    """Execute a script as `python FILE ARGUMENTS` does; its trainers' runs have the settings `a.b=c` in `overrides`.

    Raises `InputError` if there is no such file, and what the script raises.
    """
    if not file.is_file():
        raise InputError("file not found", where=str(file), expected="a Python script that calls Trainer.train")
    kept_arguments, kept_path = sys.argv, sys.path
    sys.argv, sys.path = [str(file), *arguments], [str(file.absolute().parent), *sys.path]
    token = _GIVEN.set(tuple(overrides))
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        _GIVEN.reset(token)
        sys.argv, sys.path = kept_arguments, kept_path


def with_overrides(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a job, in groups, with those that were given beside the script in their place.

    Raises `InputError` for one that is not of the form `a.b=c`.
    """
    found = dict(settings)
    for override in _GIVEN.get():
        key, equals, value = override.partition("=")
        if not equals:
            raise InputError(f"'{override}' is no setting", where="--set", expected="a.b=c")
        try:
            parsed = value_of(value, key)
        except yaml.YAMLError:
            raise InputError(f"'{value}' is not valid YAML", where=f"--set {key}") from None
        found = _placed(found, key.split("."), parsed)
    return found


def _placed(settings: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    if len(path) == 1:
        return {**settings, path[0]: value}
    within = settings.get(path[0])
    return {**settings, path[0]: _placed(within if isinstance(within, Mapping) else {}, path[1:], value)}
