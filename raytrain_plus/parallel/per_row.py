"""Amounts that grow with the rows of a microbatch, such as bytes and seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PerRow:
    """An amount: `fixed`, and `per_row` for each row of a microbatch."""

    fixed: float
    per_row: float

    def at(self, rows: int) -> float:
        """Return the amount with microbatches of that many rows."""
        return self.fixed + self.per_row * rows

    def most_rows(self, room: float) -> int:
        """Return the most rows of a microbatch for which `room` suffices; 0 if not even one row fits.

        >>> PerRow(10.0, 4.0).most_rows(31.0), PerRow(10.0, 4.0).most_rows(5.0)
        (5, 0)
        """
        left = room - self.fixed
        if left < self.per_row:
            return 0
        return int(left // self.per_row) if self.per_row else 1 << 62


def through(small: tuple[int, float], large: tuple[int, float]) -> PerRow:
    """Return the line through two measurements (rows, amount); one through the larger if the amount does not rise.

    >>> through((2, 14.0), (4, 18.0))
    PerRow(fixed=10.0, per_row=2.0)
    """
    (rows, used), (more_rows, more_used) = small, large
    per_row = max(0.0, (more_used - used) / (more_rows - rows)) if more_rows > rows else 0.0
    return PerRow(more_used - per_row * more_rows, per_row)
