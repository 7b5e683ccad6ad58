"""Find in the output of a build the lines that say why it failed. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHOWN = 25
"""Maximum number of lines that are shown."""
_BLOCK = 8
"""Maximum number of lines of one message of CMake."""

_CMAKE = re.compile(r"\s*CMake Error\b")
_COMPILER = re.compile(r"\berror: |undefined reference|cannot find -l|No space left|: command not found", re.IGNORECASE)
_WRAPPERS = re.compile(
    r"\s*(error: subprocess-exited-with-error|error: metadata-generation-failed|ERROR: Failed (building|to build)\b)"
)
"""What pip says around every failure."""


def error_lines(output: str) -> list[str]:
    """Return the first lines of `output` that name errors, or its last lines if none does.

    A message of CMake is several lines: its place, then indented text.
    """
    lines = output.splitlines()
    found: list[str] = []
    at = 0
    while at < len(lines):
        until = at + 1
        if _CMAKE.match(lines[at]):
            until = _end_of_message(lines, at)
            found += [line for line in lines[at:until] if line.strip()]
        elif _COMPILER.search(lines[at]) and not _WRAPPERS.match(lines[at]):
            found.append(lines[at])
        at = until
    return (found or lines[-SHOWN:])[:SHOWN]


def _end_of_message(lines: Sequence[str], at: int) -> int:
    """Return the index after a message of CMake: it ends with a line that is not indented further than its first."""
    indent = _indent(lines[at])
    until = at + 1
    while until < min(len(lines), at + _BLOCK) and (not lines[until].strip() or _indent(lines[until]) > indent):
        until += 1
    return until


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
