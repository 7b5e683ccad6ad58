"""Run a stage's chunks one after the other, without torch's schedules, which take a second to load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from typing_extensions import override

from raytrain_plus.parallel.pipeline.chunk import Chunk, PassWork
from raytrain_plus.parallel.pipeline.timeline import Kind


class Runner(Protocol):
    """Runs the passes of a stage's chunks."""

    def run(self, work: PassWork, microbatches: int) -> None:
        """Run the forward and backward passes of a step.

        Raises the errors of the task's code, and `Interrupted` if the replica's world breaks.
        """

    def forward(self, work: PassWork, microbatches: int) -> list[Any]:
        """Run only forward passes, without gradients.

        Returns the loss function's results on the stage of the last chunk.
        """


Around = Callable[[Kind, int], AbstractContextManager[None]]
"""Returns a context that is open while all microbatches pass through a chunk, forward ("F") or backward ("B")."""


class InTurn(Runner):
    """A `Runner`: all microbatches pass through a chunk before they pass through the next one; then they go back."""

    def __init__(self, chunks: Sequence[Chunk], around: Around) -> None:
        self._chunks = chunks
        self._around = around

    @override
    def run(self, work: PassWork, microbatches: int) -> None:
        for chunk in self._chunks:
            chunk.begin(work, microbatches)
        forward_then_backward(self._chunks, microbatches, self._around)

    @override
    def forward(self, work: PassWork, microbatches: int) -> list[Any]:
        return forward_only(self._chunks, work, microbatches, self._around)


class OneByOne(Runner):
    """A `Runner` of a model in one chunk: each microbatch passes forward and backward before the next one."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk

    @override
    def run(self, work: PassWork, microbatches: int) -> None:
        self._chunk.begin(work, microbatches)
        for microbatch in range(microbatches):
            self._chunk.forward_one_chunk(microbatch)
            self._chunk.backward_one_chunk(microbatch)

    @override
    def forward(self, work: PassWork, microbatches: int) -> list[Any]:
        return forward_only([self._chunk], work, microbatches)


def _nothing(kind: Kind, chunk: int) -> AbstractContextManager[None]:
    return nullcontext()


def forward_only(chunks: Sequence[Chunk], work: PassWork, microbatches: int, around: Around = _nothing) -> list[Any]:
    """See `Runner.forward`."""
    for chunk in chunks:
        chunk.begin(work, microbatches)
    with torch.no_grad():
        return _forwards(chunks, microbatches, around)


def forward_then_backward(chunks: Sequence[Chunk], microbatches: int, around: Around = _nothing) -> None:
    """Run all forward passes, then all backward passes, chunk by chunk; every chunk has begun.

    Also for a number of microbatches that a schedule does not support, as in the last step of a job.
    """
    _forwards(chunks, microbatches, around)
    for chunk in reversed(chunks):
        after = _own(chunks, chunk.stage_index + 1)
        with around("B", chunk.stage_index):
            for microbatch in range(microbatches):
                if after is not None:
                    chunk.set_local_bwd_input(after.get_local_bwd_output(microbatch), microbatch)
                chunk.backward_one_chunk(microbatch)


def _forwards(chunks: Sequence[Chunk], microbatches: int, around: Around) -> list[Any]:
    """Run all forward passes, chunk by chunk; return the last chunk's outputs if this stage has it."""
    found = []
    for chunk in chunks:
        after = _own(chunks, chunk.stage_index + 1)
        with around("F", chunk.stage_index):
            for microbatch in range(microbatches):
                output = chunk.forward_one_chunk(microbatch)
                if chunk.is_last:
                    found.append(output)
                elif after is not None:
                    after.set_local_fwd_input(output, microbatch)
    return found


def _own(chunks: Sequence[Chunk], index: int) -> Chunk | None:
    """Return the chunk with that number if this stage has it."""
    return next((chunk for chunk in chunks if chunk.stage_index == index), None)
