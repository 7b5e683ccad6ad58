"""What a training function keeps from step to step: a small mapping of JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raytrain_plus.errors import TaskError

MOST_BYTES = 65_536
"""The largest size as text: each checkpoint and each worker that joins gets it."""


def plain_values(state: Any) -> dict[str, Any]:
    """Return the mapping as JSON keeps it. Raises `TaskError` if it cannot."""
    if not isinstance(state, Mapping):
        raise _refused(f"returned {type(state).__name__}")
    try:
        text = json.dumps(dict(state), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _refused(f"returned what is no JSON: {error}") from None
    if len(text) > MOST_BYTES:
        raise _refused(f"returned {len(text):,} bytes")
    found: dict[str, Any] = json.loads(text)
    return found


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy, which may be changed."""
    found: dict[str, Any] = json.loads(json.dumps(dict(state)))
    return found


def _refused(what: str) -> TaskError:
    return TaskError(
        f"the function of session.after_step {what}",
        where="session.after_step",
        expected=f"a mapping of text, numbers, lists and mappings, up to {MOST_BYTES:,} bytes; none of them NaN",
    )
