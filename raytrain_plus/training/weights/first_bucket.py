"""The rider of a step's first gradient bucket: the header, the metrics, and small buffers are summed with it.

    header | a row of metrics for each shard | a row of buffer sums for each member        words of 64 bits

A separate sum, however small, costs one more round of agreement per step on what to sum. Each word has one writer;
every other worker adds zero. So the sum passes the writer's bits to all workers unchanged. A floating-point bucket sums
whole numbers exactly while they fit its significant bits, so a word is sent as digits that do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from raytrain_plus.collective.world import Work, World
from raytrain_plus.device_copies import Numbers, from_host
from raytrain_plus.parallel.gradients import Gradients
from raytrain_plus.training.exchange import header
from raytrain_plus.training.exchange.step_metrics import OwnMetrics, Table
from raytrain_plus.training.weights.buffers import Buffers

MOST_BYTES = 64 << 10
"""Buffers travel with the bucket if those of all members take at most this many bytes there."""
_DIGIT_BITS = {torch.float64: 32, torch.float32: 16}


class Rider:
    """The numbers that are summed with the first bucket of a worker's first part; see the module docstring."""

    def __init__(self, gradients: Gradients, buffers: Sequence[Buffers], shards: int) -> None:
        """Describe the end of the first bucket of `gradients`.

        `buffers`: those of all parts that the worker holds. `shards`: the job's number of them.
        """
        self._gradients = gradients
        self._buffers = buffers
        self._shards = shards
        self._metrics = self._members = 0
        self.alone = False
        """Whether the world has no other members: then nothing travels."""
        self._words_of: Callable[[], npt.NDArray[np.int64]] = lambda: np.zeros(0, dtype=np.int64)
        """Returns what this member alone has written last."""
        self._summed: Numbers | None = None

    @property
    def carries_buffers(self) -> bool:
        """Whether the sums of buffers travel here."""
        return self._members > 0

    def fit(self, metrics: int, members: int, *, buffers: bool = True) -> None:
        """Make room for `metrics` of each shard, and for the `buffers` of the world's `members`, between steps.

        If those would take too much room, `carries_buffers` is False from now on. One member alone has all sums.
        """
        dtype = self._gradients.rider.dtype
        taken = digits(members * self._words, dtype) * dtype.itemsize
        self.alone = members == 1
        self._metrics = metrics
        self._members = members if buffers and not self.alone and 0 < taken <= MOST_BYTES else 0
        words = header.size(self._shards) + self._shards * metrics + self._members * self._words
        self._gradients.ride(lambda dtype: digits(words, dtype))
        self._summed = None

    def write(self, encoded: npt.NDArray[np.int64], own: OwnMetrics) -> None:
        """Write this replica's header and metrics, for which there may be no room."""
        words = self._joined(encoded, own)
        if self.alone:
            self._words_of = lambda: words
        else:
            rider = self._gradients.rider
            digits_of = to_digits(torch.from_numpy(words), rider.dtype)
            rider[: len(digits_of)] = from_host(digits_of, rider.device)

    def write_later(self, encode: Callable[[], npt.NDArray[np.int64]], own: OwnMetrics) -> None:
        """Write them when they are read, which needs no other member; `encode` returns the header, and fills `own`."""
        assert self.alone, "the other members wait for this header"
        self._words_of = lambda: self._joined(encode(), own)

    def _joined(self, encoded: npt.NDArray[np.int64], own: OwnMetrics) -> npt.NDArray[np.int64]:
        words = np.zeros(len(encoded) + self._shards * self._metrics, dtype=np.int64)
        words[: len(encoded)] = encoded
        if own.sums is not None and len(own.names) <= self._metrics:
            words[len(encoded) :].view(np.float64).reshape(self._shards, -1)[:, : len(own.names)] = own.sums
        return words

    def write_buffers(self, rank: int) -> None:
        """Write this member's sums of buffers, if they travel here; the member's last forward pass has ended."""
        if self.carries_buffers:
            rider = self._gradients.rider
            own = to_digits(torch.cat([buffers.own() for buffers in self._buffers]), rider.dtype)
            rider[self._begin_of_buffers :].view(self._members, -1)[rank] = own

    def submit_buffers(self, world: World) -> list[Work]:
        """Start the sums of buffers that do not travel here: on every replica they come before the gradients."""
        if self.carries_buffers:
            return []
        return [world.reduce(*one) for buffers in self._buffers for one in buffers.to_reduce()]

    @property
    def unread(self) -> list[Numbers]:
        """What `read` reads, after the sums."""
        if self.alone:
            return []
        if self._summed is None:
            self._summed = Numbers(self._gradients.rider[: self._begin_of_buffers])
        return [self._summed]

    def read(self) -> tuple[npt.NDArray[np.int64], Table]:
        """Return the summed header, and the metrics with a row for each shard."""
        if self.alone:
            words = self._words_of()
        else:
            [summed] = self.unread
            words = from_digits(summed.host().to(self._gradients.rider.dtype)).numpy()
        size = header.size(self._shards)
        return words[:size], words[size:].view(np.float64).reshape(self._shards, -1)

    def read_buffers(self) -> None:
        """Give the buffers their sums over all members, if they travel here."""
        if self.carries_buffers:
            words = from_digits(self._gradients.rider[self._begin_of_buffers :]).view(self._members, -1)
            sizes = [buffers.words for buffers in self._buffers]
            for buffers, of_members in zip(self._buffers, words.split(sizes, dim=1), strict=True):
                buffers.combine(of_members)

    @property
    def _words(self) -> int:
        return sum(buffers.words for buffers in self._buffers)

    @property
    def _begin_of_buffers(self) -> int:
        words = header.size(self._shards) + self._shards * self._metrics
        return digits(words, self._gradients.rider.dtype)


def digits(words: int, dtype: torch.dtype) -> int:
    """Return how many numbers of a floating-point type carry `words` words of 64 bits."""
    return words * 64 // _DIGIT_BITS[dtype]


def to_digits(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return int64 words as whole numbers that `dtype` sums exactly, given one writer for each."""
    if dtype == torch.float32:
        return (words.view(torch.int16).to(torch.int32) & 0xFFFF).to(dtype)
    return (words.view(torch.int32).to(torch.int64) & 0xFFFFFFFF).to(dtype)


def from_digits(summed: torch.Tensor) -> torch.Tensor:
    """Return the int64 words from their summed digits. A flag raised by very many workers stays raised."""
    whole = summed.clamp(max=2 ** _DIGIT_BITS[summed.dtype] - 1).to(torch.int64)
    # Narrowing keeps the lower bits.
    return whole.to(torch.int16 if summed.dtype == torch.float32 else torch.int32).view(torch.int64)
