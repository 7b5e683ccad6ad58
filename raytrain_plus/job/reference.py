"""Render the reference of all settings, in `jobs/reference.md`, from the docstrings of their classes.

As a module: prints it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from raytrain_plus.job import settings

_TYPES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Mapping: "mapping",
    Sequence: "list",
}


def reference() -> str:
    """Return Markdown: one line for each setting, with its type, default and meaning."""
    return "\n".join([*_lines(settings.Job, ""), ""])


def _lines(of: type, prefix: str) -> Iterator[str]:
    hints, texts = get_type_hints(of), _docstrings(of)
    nested: list[tuple[type, str]] = []
    for one in dataclasses.fields(of):
        name = f"{prefix}{one.name}"
        hint = next((arg for arg in _choices(hints[one.name]) if dataclasses.is_dataclass(arg)), None)
        if isinstance(hint, type):
            nested.append((hint, name))
        yield f"- `{name}` ({', '.join(filter(None, [_kind(hints[one.name]), _default(one)]))}): {texts[one.name]}"
    for hint, name in nested:
        yield from ["", f"### {name}", "", *_lines(hint, f"{name}.")]


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; of another type, the type itself."""
    origin = get_origin(hint)
    return get_args(hint) if origin in (Union, UnionType) else (hint,)


def _kind(hint: Any) -> str:
    kinds = []
    for one in _choices(hint):
        if get_origin(one) is Literal:
            kinds.append(" or ".join(f"`{value}`" for value in get_args(one)))
        elif dataclasses.is_dataclass(one):
            kinds.append("settings below")
        elif (get_origin(one) or one) in _TYPES:
            kinds.append(_TYPES[get_origin(one) or one])
    return " or ".join(kinds)


def _default(one: dataclasses.Field[Any]) -> str:
    if one.default is dataclasses.MISSING:
        return "" if one.default_factory is not dataclasses.MISSING else "required"
    shown = "none" if one.default is None else one.default
    return f"default `{shown}`"


def _docstrings(of: type) -> dict[str, str]:
    """Return the text below each field of a class, on one line."""
    body = ast.parse(inspect.getsource(of)).body[0].body  # type: ignore[attr-defined]
    found = {}
    for one, following in itertools.pairwise(body):
        if isinstance(one, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(one.target, ast.Name)
            assert isinstance(following.value, ast.Constant)
            found[one.target.id] = " ".join(str(following.value.value).split())
    return found


if __name__ == "__main__":
    print(reference())
