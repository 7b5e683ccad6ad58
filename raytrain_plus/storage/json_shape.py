"""Check plain JSON values against the shape that a document must have. Pure.

A shape is a function that takes a value and returns what is wrong with it, in words; an empty text if it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

JsonShape = Callable[[Any], str]
MOST = 2**63 - 1


def anything(value: Any) -> str:
    """Fit every value."""
    return ""


def text(value: Any) -> str:
    """Fit every text. An error's text may contain characters that a file name cannot."""
    return "" if isinstance(value, str) else f"{_spelled(value)} is not a string"


def name(value: Any) -> str:
    """Fit text that can be a file name: encodable and without NUL."""
    if not isinstance(value, str):
        return text(value)
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        return f"{_spelled(value)} contains an invalid character"
    return ""


def truth(value: Any) -> str:
    """Fit true and false."""
    return "" if isinstance(value, bool) else f"{_spelled(value)} is not a boolean"


def whole(lowest: int, highest: int = MOST) -> JsonShape:
    """Fit whole numbers from `lowest` to `highest`."""

    def check(value: Any) -> str:
        if isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest:
            return ""
        upper = "up" if highest == MOST else f"to {highest:,}"
        return f"{_spelled(value)} is not an integer from {lowest:,} {upper}"

    return check


def number(lowest: float = -math.inf, highest: float = math.inf) -> JsonShape:
    """Fit finite numbers from `lowest` to `highest`."""

    def check(value: Any) -> str:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300:
            return "" if lowest <= value <= highest else f"{_spelled(value)} is out of range"
        return f"{_spelled(value)} is not a finite number"

    return check


def number_or_nonfinite(value: Any) -> str:
    """Fit numbers; NaN and infinities are spelled as text, see `json_text`."""
    if isinstance(value, float) or value in ("nan", "inf", "-inf"):
        return ""
    return number()(value).replace("finite number", "number")


def one_of(*values: str) -> JsonShape:
    """Fit only these texts."""
    return lambda value: "" if value in values else f"{_spelled(value)} is not one of {', '.join(values)}"


def maybe(shape: JsonShape) -> JsonShape:
    """Fit null and whatever `shape` fits."""
    return lambda value: "" if value is None else shape(value)


def list_of(shape: JsonShape) -> JsonShape:
    """Fit lists whose entries all fit."""

    def check(value: Any) -> str:
        if not isinstance(value, list):
            return f"{_spelled(value)} is not a list"
        return next((f"entry {place}: {wrong}" for place, one in enumerate(value) if (wrong := shape(one))), "")

    return check


def table_of(shape: JsonShape) -> JsonShape:
    """Fit objects with any names whose values all fit."""

    def check(value: Any) -> str:
        if not isinstance(value, Mapping):
            return f"{_spelled(value)} is not an object"
        return next((f"{key!a}: {wrong}" for key, one in value.items() if (wrong := shape(one))), "")

    return check


def object_of(**fields: JsonShape) -> JsonShape:
    """Fit objects that have at least these fields."""

    def check(value: Any) -> str:
        if not isinstance(value, Mapping):
            return f"{_spelled(value)} is not an object"
        for field, shape in fields.items():
            if field not in value:
                return f"the field {field!r} is missing"
            if wrong := shape(value[field]):
                return f"{field}: {wrong}"
        return ""

    return check


def _spelled(value: Any) -> str:
    if isinstance(value, int) and abs(value) > MOST:
        return "a number of more than 64 bits"
    spelled = ascii(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return spelled if len(spelled) <= 60 else f"{spelled[:60]}..."
