"""Describe one tensor of the state, as its hash and its files need it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

OF_MODEL = ("param/", "buffer/", "ema/")
"""How the names of tensors begin that belong to the model rather than the optimizer."""
REBUILT = "rebuilt/"
"""How the names of digests begin, which stand for frozen weights that each worker builds by itself."""
OF_LAYERS = (*OF_MODEL, REBUILT)
"""How the names of tensors begin that exist before any step."""


Cut = tuple[Literal["column", "row", "vocabulary"], int]
"""How a tensor is cut into slices, `row` by its columns and the others by its rows; of how many parts it consists that
are cut each by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """One tensor of the state."""

    name: str
    """Its name, as in `state.named`."""
    dtype: str
    """Its dtype's torch name."""
    shape: tuple[int, ...]
    size: int
    """Its size in bytes."""
    scalar: bytes = b""
    """The value of a tensor without dimensions, as a little-endian float64; of a digest, itself."""
    held: tuple[int, int] | None = None
    """The rows [first, last) that a worker has of it; None for all."""
    cut: Cut | None = None
    """If it is a slice of a tensor, how that one is cut."""
    also: tuple[str, ...] = ()
    """Its further names in the model's `state_dict`, under which the file of the model has it too."""

    @property
    def rows(self) -> int:
        """The number of its rows; a tensor without dimensions has one, and so has an empty one."""
        return (self.shape[0] if self.shape else 1) or 1

    @property
    def head(self) -> bytes:
        """The bytes that precede its data in the state's hash."""
        dtype = self.dtype if self.shape else "float64"
        return f"{self.name}\0{dtype}\0{','.join(map(str, self.shape))}\0".encode()

    @property
    def of_model(self) -> bool:
        """Whether it belongs to the model rather than the optimizer."""
        return self.name.startswith(OF_MODEL)


def to_export(names: Iterable[str]) -> list[str]:
    """Return those of a state's tensors that a file of the model holds: averages in place of their weights.

    >>> to_export(["buffer/b", "ema/w", "optim/w/step", "param/v", "param/w"])
    ['buffer/b', 'ema/w', 'param/v']
    """
    ordered = [name for name in names if name.startswith(OF_MODEL)]
    averaged = {name.replace("ema/", "param/", 1) for name in ordered if name.startswith("ema/")}
    return [name for name in ordered if name not in averaged]
