"""JSON objects in a run's files: what is damaged is told by its place."""

from __future__ import annotations

import json
from typing import Any

from raytrain_plus.errors import InputError
from raytrain_plus.storage.folder import Folder


def read_object(folder: Folder, name: str, remedy: str) -> dict[str, Any]:
    """The object in a file. Raises `FileNotFoundError` where there is no file, `InputError` where it holds none."""
    return parse_object(folder.read(name), f"{folder.where}/{name}", 1, remedy)


def parse_object(text: bytes, file: str, line: int, remedy: str) -> dict[str, Any]:
    """An object out of its text, which begins in this line of a file. Raises `InputError` where it is none."""
    try:
        value = json.loads(text.decode())
    except json.JSONDecodeError as error:
        what, line = error.msg, line + error.lineno - 1
    except (UnicodeDecodeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
    else:
        if isinstance(value, dict):
            return value
        what = "it is no object"
    raise InputError(f"the file is damaged: {what}", where=f"{file}, line {line}", remedy=remedy)
