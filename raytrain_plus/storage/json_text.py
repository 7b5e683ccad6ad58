"""Write strict JSON: values that JSON lacks are spelled as text, and credentials are stripped. Pure."""

from __future__ import annotations

import json
import math
from typing import Any

from raytrain_plus.credentials import hide_credentials


def json_text(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON; NaN and infinities become texts that `float` reads, credentials are stripped.

    >>> json_text({"loss": float("nan"), "steps": 3})
    '{"loss": "nan", "steps": 3}'
    """
    return json.dumps(hide_credentials(_plain(value)), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
