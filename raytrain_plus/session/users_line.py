"""Where in the user's code something is called, for errors."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import CodeType

import torch

_BENEATH = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def users_line() -> str:
    """Return the file and the line of the user's code that is being run."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_BENEATH):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def first_line_of(code: CodeType) -> str:
    """Return the file and the line in which a function is defined."""
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
