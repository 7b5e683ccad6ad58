"""Report what is wrong with one row by its place among the rows at hand."""

from __future__ import annotations


class RowFault(Exception):
    """A function that is applied to rows met a wrong one; `transform_block` raises a `DataError` that names it."""

    def __init__(self, row: int, what: str, remedy: str = "") -> None:
        """`row`: the place, from 0, among the rows that the function got; `what` and `remedy`: see `InputError`."""
        super().__init__(row, what, remedy)
        self.row, self.what, self.remedy = row, what, remedy

    def at(self, row: int) -> RowFault:
        """Return the same of the row at another place."""
        return RowFault(row, self.what, self.remedy)
