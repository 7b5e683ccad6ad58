"""Secrets in a job's `args`: `${env:NAME}` stands for an environment variable, and is what is written down. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raytrain_plus.errors import InputError

REFERENCE = re.compile(r"\$\{env:([^}]*)\}")


def resolved(value: Any, environment: Mapping[str, str], where: str = "args") -> Any:
    """The value, in which texts say what the variables hold that they refer to; `where` it stands in the job.

    Raises `InputError` for a variable that is not set.

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
                remedy="set it where the job is begun, and on a cluster for the processes of every machine",
            )
        return environment[name]

    return REFERENCE.sub(variable, value)
