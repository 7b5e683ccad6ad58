"""One tensor of the state, as its hash and the files know it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    name: str
    """As in `state.named`."""
    dtype: str
    """In torch's words."""
    shape: tuple[int, ...]
    size: int
    """In bytes."""
    scalar: bytes = b""
    """The value of a tensor without dimensions, as a little-endian float64."""

    @property
    def head(self) -> bytes:
        """What comes before its bytes in the state's hash."""
        dtype = self.dtype if self.shape else "float64"
        return f"{self.name}\0{dtype}\0{','.join(map(str, self.shape))}\0".encode()

    @property
    def of_model(self) -> bool:
        """Whether it belongs to the model, not to the optimizer."""
        return self.name.startswith(("param/", "buffer/"))
