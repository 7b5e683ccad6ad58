"""Run torch's own schedules (torch.distributed.pipelining, 2.13) on our stages (`chunk`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from typing_extensions import override

from raytrain_plus.job.settings import Schedule
from raytrain_plus.parallel.pipeline import timeline
from raytrain_plus.parallel.pipeline.chunk import Chunk, PassWork
from raytrain_plus.parallel.pipeline.layout import chunk_stages, schedule_fault
from raytrain_plus.parallel.pipeline.sequential import Runner, forward_only, forward_then_backward
from raytrain_plus.parallel.pipeline.timeline import Action, Orders
from raytrain_plus.torch_compat import run_schedule

_CLASSES: dict[Schedule, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleZBVZeroBubble,
    # The same order, over the microbatches of several steps.
    "pipedream": pipelining.Schedule1F1B,
}


def orders(schedule: Schedule, stages: int, microbatches: int) -> Orders:
    """Return each stage's actions in order."""
    if schedule == "gpipe":
        return timeline.gpipe(stages, microbatches)
    if schedule in ("1f1b", "pipedream"):
        return timeline.one_forward_one_backward(stages, microbatches)
    count = len(chunk_stages(schedule, stages))
    own: list[Any] = [
        SimpleNamespace(stage_index=chunk, num_stages=count, group_size=stages, group_rank=0, submod=torch.nn.Module())
        for chunk, stage in enumerate(chunk_stages(schedule, stages))
        if stage == 0
    ]
    known = _CLASSES[schedule](own, microbatches).pipeline_order
    return [
        [
            Action(one.computation_type.value, one.stage_index, one.microbatch_index)
            for one in known[stage]
            if one is not None
        ]
        for stage in range(stages)
    ]


class Pipeline(Runner):
    """The `sequential.Runner` of one stage's chunks, by a schedule, with the model replica's other stages."""

    def __init__(self, schedule: Schedule, chunks: Sequence[Chunk]) -> None:
        self._schedule = schedule
        self._chunks = list(chunks)
        self._built: dict[int, Any] = {}
        """Torch's schedules by the number of microbatches."""

    @override
    def run(self, work: PassWork, microbatches: int) -> None:
        for chunk in self._chunks:
            chunk.begin(work, microbatches)
        if schedule_fault(self._schedule, self._chunks[0].group_size, microbatches):
            forward_then_backward(self._chunks, microbatches)
            return
        running = self._built.pop(microbatches, None) or self._build(microbatches)
        with _silent():
            run_schedule(running, microbatches)
        # An aborted schedule is not used again.
        self._built[microbatches] = running

    @override
    def forward(self, work: PassWork, microbatches: int) -> list[Any]:
        return forward_only(self._chunks, work, microbatches)

    def _build(self, microbatches: int) -> Any:
        made = _CLASSES[self._schedule](
            self._chunks[0] if issubclass(_CLASSES[self._schedule], PipelineScheduleSingle) else self._chunks,
            microbatches,
            loss_fn=lambda loss, nothing: loss,
            scale_grads=False,
        )
        # Our chunks need neither torch's shape inference nor its connections.
        for name in ("stage", "stages"):
            if hasattr(made, f"_{name}_forward_initialized"):
                setattr(made, f"_{name}_forward_initialized", True)
                setattr(made, f"_{name}_backward_initialized", True)
        return made


@contextmanager
def _silent() -> Iterator[None]:
    """Keep torch from logging whole schedules when a stage is aborted; the error itself gives the reason."""
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
