"""The bounds of single settings: each function returns what is wrong with a value of the right type, or None. Pure.

They stand at the fields of `job.settings` and `job.data_settings`. What settings may not be together is in
`job.value_checks`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, get_args

from raytrain_plus.job.setting_types import Bound, Format, Problem
from raytrain_plus.storage.address import SCHEMES, is_address


def run_name(name: str) -> Problem:
    """The name of a run, which is the name of a folder."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        return None
    why = "contains a path separator" if "/" in name or "\\" in name else "is not a valid name"
    return (
        f"{name!r} {why}",
        "letters, digits, '.', '_' and '-', starting with a letter or digit, at most 128 characters",
        "set the folder with `storage`",
    )


MOST = 10**9
"""Limit of every count and every time in seconds: a larger value is a mistake, and overflows 64 bits or a clock."""


def at_least(lowest: float, highest: float = MOST) -> Bound:
    """A number from `lowest` to `highest`."""

    def check(value: float | None) -> Problem:
        if value is None or (math.isfinite(value) and lowest <= value <= highest):
            return None
        bound = f"at most {highest:,}" if value > highest else f"{lowest:g} or more"
        return f"{value} is not allowed", bound, ""

    return check


def above_zero(value: float | None) -> Problem:
    """A number above 0."""
    if value is None or (math.isfinite(value) and value > 0):
        return None
    return f"{value} is not allowed", "a number above 0", ""


def seconds(value: float | None) -> Problem:
    """A time in seconds, above 0."""
    if value is None or value <= MOST:
        return above_zero(value)
    return f"{value} is not allowed", f"at most {MOST:,} seconds", ""


def power_of_two(value: int) -> Problem:
    """1, 2, 4, ..."""
    if value >= 1 and not value & (value - 1):
        return None
    return f"{value} is no power of two", "1, 2, 4, 8, ...", ""


TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "string", "binary", "large_string", "large_binary"),
)
"""The types of columns that `data.columns` can name, as Arrow names them."""
MOST_PIXELS = 16_384
"""Limit of the height and the width of images."""


def columns(columns: Sequence[str] | Mapping[str, str] | None) -> Problem:
    """Columns to read, by name or with their types."""
    if columns is None:
        return None
    if not columns or len(set(columns)) != len(columns):
        return ("it names no column" if not columns else "it names a column twice"), "the names of columns", ""
    for name, kind in columns.items() if isinstance(columns, Mapping) else ():
        if kind not in TYPES:
            near = difflib.get_close_matches(str(kind), TYPES, 1)
            remedy = f"did you mean '{near[0]}'?" if near else "leave the type out if it need not change"
            return f"'{kind}' is not a type that a column can be read with ('{name}')", ", ".join(TYPES), remedy
    return None


def image_size(size: Sequence[int] | None) -> Problem:
    """A height and a width in pixels."""
    if size is None or (len(size) == 2 and all(1 <= pixels <= MOST_PIXELS for pixels in size)):
        return None
    return (
        f"{[*size]} is not a size of images",
        f"[height, width], each from 1 to {MOST_PIXELS:,} pixels",
        "",
    )


MOST_SOURCES = 16
"""Maximum sources of `data.mix`."""
LEAST_SHARE = Fraction(1, 10_000)
"""Minimum share of a source in the rows: one place of the longest pattern; see `data.order.mixed_order`."""
_OF_SOURCE = ("path", "dataset", "format", "weight")


def mix(mix: Sequence[Mapping[str, Any]] | None) -> Problem:
    """The sources of a mix, and their weights."""
    if mix is None:
        return None
    if not 2 <= len(mix) <= MOST_SOURCES:
        what = f"{len(mix)} source{'s' * (len(mix) != 1)} cannot be mixed"
        return what, f"2 to {MOST_SOURCES} sources", "for a single one use data.path" if len(mix) == 1 else ""
    for number, source in enumerate(mix):
        if problem := _one_of_mix(source):
            return f"source {number}: {problem[0]}", problem[1], problem[2]
    weights = [Fraction(str(source["weight"])) for source in mix]
    for number, weight in enumerate(weights):
        if weight < LEAST_SHARE * sum(weights):
            return f"source {number}: its weight is less than a ten-thousandth of all weights", "a larger weight", ""
    return None


def one_place(path: str | None, dataset: str | None) -> Problem:
    """Return what is wrong with two ways to name rows."""
    if (path is None) != (dataset is None):
        return None
    given = "neither `path` nor `dataset` is given" if path is None else "both `path` and `dataset` are given"
    return given, "exactly one of them", ""


def _one_of_mix(source: Mapping[str, Any]) -> Problem:
    """Return what is wrong with one source of a mix."""
    for key in source:
        if key not in _OF_SOURCE:
            near = difflib.get_close_matches(key, _OF_SOURCE, 1)
            remedy = f"did you mean '{near[0]}'?" if near else ""
            return f"unknown setting '{key}'", f"one of {', '.join(_OF_SOURCE)}", remedy
    path, dataset, form, weight = (source.get(key) for key in _OF_SOURCE)
    for key, value in (("path", path), ("dataset", dataset)):
        if value is not None and not isinstance(value, str):
            return f"its {key} {value!r} is not allowed", "a string", ""
    if problem := one_place(path, dataset) or import_path(dataset) or address(path):
        return problem
    if form is not None and (form not in get_args(Format) or dataset is not None):
        what = f"its format {form!r} is not allowed"
        return what, f"one of {', '.join(get_args(Format))}, for a path", ""
    if weight is None:
        return "its weight is missing", "a number above 0", ""
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not (0 < weight <= MOST):
        return f"its weight {weight!r} is not allowed", f"a number above 0, at most {MOST:,}", ""
    return None


def share(value: float) -> Problem:
    """A share above 0 and below 1."""
    return None if 0 < value < 1 else (f"{value:g} is not allowed", "a number above 0 and below 1, such as 0.999", "")


def one_device(gpus: float) -> Problem:
    """How many GPUs a worker has."""
    return None if gpus in (0, 1) else (f"{gpus:g} is not allowed", "0 or 1: a worker trains on one device", "")


def accelerator_type(name: str | None) -> Problem:
    """One of Ray's accelerator types."""
    if name is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        return None
    return f"{name!r} is not an accelerator type", "a type of Ray, such as H100 or A100", ""


def import_path(spec: str | type | None) -> Problem:
    """A place in the code, `module:name`; in Python a class, too."""
    if not isinstance(spec, str) or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", spec):
        return None
    module, dot, name = spec.rpartition(".")
    near = f"{module}:{name}"
    remedy = f"did you mean '{near}'?" if dot and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", near) else ""
    return f"{spec!r} is not an import path", "module:name, such as examples.digits:Digits", remedy


COLLATES = ("stack", "pad", "pack")
"""The ready functions of `data.collate`."""
MOST_TOKENS = 1 << 20
"""Limit of the tokens of a packed row."""


def collate_function(spec: str | None) -> Problem:
    """How rows become a batch."""
    if spec is None or spec in COLLATES or import_path(spec) is None:
        return None
    near = difflib.get_close_matches(spec, COLLATES, 1)
    return (
        f"unknown function {spec!r}",
        f"{', '.join(COLLATES)}, or module:function",
        f"did you mean '{near[0]}'?" if near else "",
    )


def address(place: str | None) -> Problem:
    """A path, or the address of a remote storage."""
    if place is None or not is_address(place):
        return None
    scheme = place.partition("://")[0]
    if scheme in SCHEMES:
        return None
    # Not the whole address: it may hold a password.
    return f"unsupported address '{scheme}://...'", f"a path, or {', '.join(f'{known}://' for known in SCHEMES)}", ""


def step_range(steps: Sequence[int]) -> Problem:
    """The steps `[first, end]`."""
    if len(steps) == 2 and 0 <= steps[0] < steps[1] <= MOST:
        return None
    return f"{[*steps]} is not a range of steps", "[first, end]: two rising whole numbers, 0 or more", ""


TRACKERS = ("mlflow", "wandb")
"""Supported trackers, by the names of their packages."""


def trackers(names: Sequence[str]) -> Problem:
    """Names of experiment trackers."""
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        there = f"{' or '.join(TRACKERS)}; TensorBoard files are always written"
        near = difflib.get_close_matches(unknown[0], TRACKERS, 1)
        return f"unknown tracker {unknown[0]!r}", there, f"did you mean '{near[0]}'?" if near else ""
    return ("a tracker is listed twice", "each tracker once", "") if len(set(names)) < len(names) else None
