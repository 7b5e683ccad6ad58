"""JSON objects in a run's files: what is damaged is told by its place."""

from __future__ import annotations

import json
from typing import Any

from raytrain_plus.errors import InputError
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.json_shape import Shape, anything


def read_object(folder: Folder, name: str, remedy: str, shape: Shape = anything) -> dict[str, Any]:
    """The object in a file. Raises `FileNotFoundError` where there is no file, `InputError` where it holds none of this
    shape."""
    return parse_object(folder.read(name), f"{folder.where}/{name}", 1, remedy, shape)


def parse_object(text: bytes, file: str, line: int, remedy: str, shape: Shape = anything) -> dict[str, Any]:
    """An object out of its text, which begins in this line of a file. Raises `InputError` where it is none, or not of
    this shape."""
    try:
        value: Any = json.loads(text.decode())
    except json.JSONDecodeError as error:
        what, line = error.msg, line + error.lineno - 1
    except (ValueError, RecursionError) as error:
        # No text, a number of thousands of digits, or brackets in brackets.
        what = f"{type(error).__name__}: {error}"
    else:
        what = shape(value) if isinstance(value, dict) else "it is no object"
        if isinstance(value, dict) and not what:
            return value
    raise InputError(f"the file is damaged: {what}", where=f"{file}, line {line}", remedy=remedy)
