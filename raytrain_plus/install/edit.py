"""A small named edit of a source package, which is checked to still apply."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raytrain_plus.errors import RunError


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `old`, which must occur exactly once in `file`, by `new`."""

    name: str
    file: str
    reason: str
    old: str
    new: str

    def apply(self, source: Path) -> None:
        """Edit the file under `source`. Raises `RunError` if `old` does not occur exactly once."""
        path = source / self.file
        text = path.read_text() if path.exists() else ""
        count = text.count(self.old)
        if count != 1:
            raise RunError(
                f"the fix '{self.name}' does not apply to Horovod's {self.file}: "
                f"the text to replace occurs {count} times instead of once"
            )
        path.write_text(text.replace(self.old, self.new))


def apply_all(source: Path, edits: Sequence[Edit]) -> None:
    """Apply `edits` to an unpacked source package."""
    for edit in edits:
        edit.apply(source)


def digest(edits: Sequence[Edit]) -> str:
    """Return eight hex digits that change with any edit: the version of the fixes in a wheel."""
    text = "\0".join(f"{edit.file}\0{edit.old}\0{edit.new}" for edit in edits)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
