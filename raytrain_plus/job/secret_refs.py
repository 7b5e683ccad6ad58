"""Resolve secrets in a job's `args`: `${env:NAME}` is an environment variable; only the name is written. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raytrain_plus.errors import InputError

REFERENCE = re.compile(r"\$\{env:([^}]*)\}")


def resolved(value: Any, environment: Mapping[str, str], where: str = "args") -> Any:
    """Return `value` with every `${env:NAME}` in its texts replaced by the variable's value in `environment`.

    `where` is the key of `value` in the job, for errors. Raises `InputError` if a variable is not set.

    >>> resolved({"token": "${env:TOKEN}", "depth": 2, "hosts": ["${env:HOST}:80"]}, {"TOKEN": "x", "HOST": "here"})
    {'token': 'x', 'depth': 2, 'hosts': ['here:80']}
    """
    if isinstance(value, Mapping):
        return {key: resolved(one, environment, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(resolved(one, environment, f"{where}[{place}]") for place, one in enumerate(value))
    if not isinstance(value, str):
        return value

    def variable(found: re.Match[str]) -> str:
        name = found[1]
        if name not in environment:
            raise InputError(
                f"the environment variable {name} is not set",
                where=where,
                remedy="set it where the job is launched and, on a cluster, for the processes of every node",
            )
        return environment[name]

    return REFERENCE.sub(variable, value)
