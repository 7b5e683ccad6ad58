"""The result of one check of the environment. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["PASS", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    """The command that fixes it; empty if nothing is wrong."""

    def lines(self) -> list[str]:
        """Return lines of text for a person."""
        fix = [f"      fix: {self.remedy}"] if self.remedy else []
        return [f"{self.status}  {self.name}: {self.detail}", *fix]
