"""Number the generations of a run: those of all its controllers, one after the other."""

from __future__ import annotations


class GenerationNumbers:
    """The numbers that events, ledger and checkpoints carry; they rise through all controllers of the run."""

    def __init__(self, first: int) -> None:
        """Begin with the number of this controller's first generation."""
        self._base = first
        """The offset added to generations: earlier controllers of the run had some."""
        self.now = first
        """The number that is carried now."""

    def adopt(self, generation: int, highest: int) -> None:
        """Continue another controller's numbers: this generation of it has reached `highest`."""
        self._base, self.now = highest - generation, highest

    def of(self, generation: int) -> int:
        """Return the number of one of this controller's generations."""
        return self._base + generation

    def reach(self, generation: int) -> None:
        """Carry the number of this generation from now on."""
        self.now = self.of(generation)

    def begin(self, generation: int) -> int:
        """Begin a new number while the group's generation stays the same; return it.

        The group's later generations have higher ones.
        """
        self._base += 1
        self.reach(generation)
        return self.now
