"""The programs of the page for who comes from elsewhere, as they were and as they are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.commands import REPOSITORY

PAGE = (REPOSITORY / "jobs" / "moving.md").read_text()


@dataclass(frozen=True, slots=True)
class Moved:
    """The blocks of one section."""

    programs: tuple[str, ...]
    before: str
    """What the program of a diff was; empty without one."""
    after: str
    """What it is here."""
    job: str
    """The YAML of its job; empty if the program has it."""


def moved(title: str) -> Moved:
    """Return the blocks of the section of this title."""
    section = re.split(r"(?m)^## ", PAGE.partition(f"\n## {title}\n")[2])[0]
    blocks = re.findall(r"(?ms)^```(\w+)\n(.*?)^```$", section)
    texts = {kind: [text for of, text in blocks if of == kind] for kind, _ in blocks}
    [diff] = texts.get("diff", [""])
    return Moved(tuple(texts.get("python", [])), _side(diff, "-"), _side(diff, "+"), "".join(texts.get("yaml", [])))


def _side(diff: str, sign: str) -> str:
    lines = diff.splitlines(keepends=True)
    return "".join(line[1:] or "\n" for line in lines if line[:1] in (sign, " ", "\n"))
