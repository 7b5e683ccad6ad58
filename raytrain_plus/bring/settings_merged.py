"""Settings of a job that follow from a script's arguments, with those that it gives itself in their place. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others in their place, group by group."""
    groups = {key: merged(settings[key], value) for key, value in given.items() if _both(settings.get(key), value)}
    length = {"steps", "epochs"} & given.keys()
    kept = {key: value for key, value in settings.items() if not (length and key in ("steps", "epochs"))}
    return {**kept, **given, **groups}


def _both(one: Any, other: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(other, Mapping)
