"""The commands that the pages state: each line of a shell block, and each command in the text. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

PAGES = (
    "README.md",
    "jobs/README.md",
    "jobs/bring.md",
    "jobs/data.md",
    "jobs/moving.md",
    "jobs/parallel.md",
    "jobs/recovery.md",
    "jobs/reference.md",
    "clusters/README.md",
    "examples/README.md",
    "tests/benchmarks/README.md",
    "raytrain_plus/README.md",
)
PROGRAMS = (
    ".",
    ".venv/bin/raytrain",
    "apt-get",
    "aws",
    "docker",
    "export",
    "jupyter",
    "kubectl",
    "make",
    "pip",
    "pytest",
    "python",
    "python3",
    "ray",
    "raytrain",
)
"""Words with which a command begins."""
CLOUD = "The commands of this section need a cloud."
"""The sentence by which a section says that no test can execute its commands."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page."""

    page: str
    line: int
    """From 1."""
    text: str
    """On one line, without its comment."""
    in_text: bool
    """Whether it stands in a sentence rather than in a shell block."""
    needs_cloud: bool

    def mentions(self, other: Command) -> bool:
        """Return whether this only names what `other` spells out, as `raytrain stop` names `raytrain stop digits`."""
        return self.in_text and other.text.startswith(f"{self.text} ")


def commands(page: str, text: str) -> list[Command]:
    """Return the commands of a page, in order. Shell blocks are fenced with `sh`.

    Raises `ValueError` if a block without a language holds a command.
    """
    found: list[Command] = []
    lines = text.splitlines()
    for first, title_to_title in _sections(lines):
        needs_cloud = CLOUD in " ".join(" ".join(title_to_title).split())
        for line, command, in_text in _in_section(page, first, title_to_title):
            found.append(Command(page, line, command, in_text, needs_cloud))
    return found


def _sections(lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield each section's first line number and its lines. In a fenced block a # begins no section."""
    starts, fenced = [0], False
    for number, line in enumerate(lines):
        fenced ^= line.lstrip().startswith("```")
        if number and not fenced and line.startswith("#"):
            starts.append(number)
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield start + 1, lines[start:end]


def _in_section(page: str, first: int, lines: list[str]) -> Iterator[tuple[int, str, bool]]:
    language: str | None = None
    block: list[tuple[int, str]] = []
    prose: list[tuple[int, str]] = []
    for number, line in enumerate(lines, first):
        if not line.lstrip().startswith("```"):
            (prose if language is None else block).append((number, line.strip()))
        elif language is None:
            yield from _in_prose(prose)
            language, block, prose = line.strip()[3:], [], []
        else:
            if language == "sh":
                yield from _in_block(block)
            elif language == "" and (odd := [line for _, line in block if _is_command(line)]):
                raise ValueError(f"{page}: {odd[0]}: a block of commands begins with ```sh")
            language = None
    yield from _in_prose(prose)


def _in_block(block: list[tuple[int, str]]) -> Iterator[tuple[int, str, bool]]:
    """Yield the commands of a shell block: a command continues after a backslash, and inside quotes."""
    held, start = "", 0
    for number, line in block:
        start = start if held else number
        held = re.sub(r"(^|\s+)# .*$", "", f"{held} {line}".strip())
        if held.endswith("\\"):
            held = held[:-1].rstrip()
        elif held.count("'") % 2 == 0:
            if held:
                yield start, held, False
            held = ""
    if held:
        raise ValueError(f"line {start}: {held}: the command does not end")


def _in_prose(prose: list[tuple[int, str]]) -> Iterator[tuple[int, str, bool]]:
    text = "\n".join(line for _, line in prose)
    for span in re.finditer(r"`([^`]+)`", text):
        command = " ".join(span[1].split())
        if _is_command(command):
            yield prose[text.count("\n", 0, span.start())][0], command, True


def _is_command(text: str) -> bool:
    first, _, rest = text.partition(" ")
    return first in PROGRAMS and bool(rest)
