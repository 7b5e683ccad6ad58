"""Read JSON objects from a run's files, and report damage with its place."""

from __future__ import annotations

import json
from typing import Any

from raytrain_plus.errors import InputError
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.json_shape import JsonShape, anything


def read_object(folder: Folder, name: str, remedy: str, shape: JsonShape = anything) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises `FileNotFoundError` if the file does not exist, `InputError` if it holds no object of this shape.
    """
    return parse_object(folder.read(name), f"{folder.where}/{name}", 1, remedy, shape)


def parse_object(text: bytes, file: str, line: int, remedy: str, shape: JsonShape = anything) -> dict[str, Any]:
    """Return the JSON object in `text`, which begins on this line of a file.

    Raises `InputError` if it is not an object of this shape.
    """
    try:
        value: Any = json.loads(text.decode())
    except json.JSONDecodeError as error:
        what, line = error.msg, line + error.lineno - 1
    except (ValueError, RecursionError) as error:
        # Not UTF-8, a number with thousands of digits, or too deeply nested brackets.
        what = f"{type(error).__name__}: {error}"
    else:
        what = shape(value) if isinstance(value, dict) else "it is not an object"
        if isinstance(value, dict) and not what:
            return value
    raise InputError(f"the file is damaged: {what}", where=f"{file}, line {line}", remedy=remedy)
