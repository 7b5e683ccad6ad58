"""Run a stage's chunks one after the other, without torch's schedules, which take a second to load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from raytrain_plus.parallel.pipeline.chunk import Chunk, PassWork


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


def forward_only(chunks: Sequence[Chunk], work: PassWork, microbatches: int) -> list[Any]:
    """See `Runner.forward`."""
    for chunk in chunks:
        chunk.begin(work, microbatches)
    with torch.no_grad():
        return _forwards(chunks, microbatches)


def forward_then_backward(chunks: Sequence[Chunk], microbatches: int) -> None:
    """Run all forward passes, then all backward passes, chunk by chunk.

    For a number of microbatches that a schedule does not support, as in the last step of a job.
    """
    _forwards(chunks, microbatches)
    for chunk in reversed(chunks):
        after = _own(chunks, chunk.stage_index + 1)
        for microbatch in range(microbatches):
            if after is not None:
                chunk.set_local_bwd_input(after.get_local_bwd_output(microbatch), microbatch)
            chunk.backward_one_chunk(microbatch)


def _forwards(chunks: Sequence[Chunk], microbatches: int) -> list[Any]:
    """Run all forward passes, chunk by chunk; return the last chunk's outputs if this stage has it."""
    found = []
    for chunk in chunks:
        after = _own(chunks, chunk.stage_index + 1)
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
