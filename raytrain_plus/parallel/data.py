"""Data parallelism: gradients live in flat buckets that are summed over the world while backward still runs.

Parameters fill buckets from the last to the first, the order in which backward finishes them. A bucket is submitted as
soon as its last gradient is there, buckets in order, so that every worker submits alike. The idea is that of
Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from raytrain_plus.collective.world import Work, World
from raytrain_plus.errors import TrainingError

BUCKET_BYTES = 4 << 20
"""Bytes after which a bucket is closed: large enough for the ring's bandwidth, small enough to overlap."""


class Gradients:
    """The gradients of a model's parameters, as views into flat buckets."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bucket_bytes: int = BUCKET_BYTES,
        rider: Callable[[torch.dtype], int] | None = None,
    ) -> None:
        """`rider` says how many numbers of a floating type are to be summed along with the first bucket."""
        self.buckets: list[torch.Tensor] = []
        self.rider = torch.zeros(0)
        """The end of the first bucket, written before the step's last backward and read when the bucket is summed."""
        self._waiting: list[int] = []
        self._sizes: list[int] = []
        self._submit: Callable[[int], None] | None = None
        self._next = 0
        self._check: Callable[[], None] = lambda: None
        self._views: list[tuple[nn.Parameter, torch.Tensor]] = []
        planned = plan_buckets(parameters, bucket_bytes)
        if rider is not None and not (planned and planned[0][0].dtype.is_floating_point):
            planned.insert(0, [])
        for index, members in enumerate(planned):
            like = members[0] if members else torch.zeros(0)
            riding = rider(like.dtype) if rider is not None and index == 0 else 0
            own = sum(parameter.numel() for parameter in members)
            flat = torch.zeros(own + riding, dtype=like.dtype, device=like.device)
            if riding:
                self.rider = flat[own:]
            at = 0
            for parameter in members:
                parameter.grad = view = flat[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
                self._views.append((parameter, view))
                parameter.register_post_accumulate_grad_hook(self._hook(len(self.buckets)))
            self.buckets.append(flat)
            self._sizes.append(len(members))
        self._waiting = list(self._sizes)

    def zero(self) -> None:
        """Clears every gradient, and what rides along."""
        for bucket in self.buckets:
            bucket.zero_()

    def reduce_during(
        self, backward: Callable[[], None], world: World, check: Callable[[], None] = lambda: None
    ) -> list[Work]:
        """Runs the step's last backward and submits each bucket as soon as it is complete; the work under way.

        `check` is called with every gradient, and ends the backward by what it raises. Raises `TrainingError` where the
        task put another tensor in the place of a gradient.
        """
        works: list[Work] = []
        self._waiting = list(self._sizes)
        self._next = 0
        self._check = check
        self._submit = lambda index: works.append(world.reduce(self.buckets[index], f"gradients.{index}"))
        try:
            backward()
            # Parameters that took no part in this backward have not reported; their zeros (or the sums of earlier
            # microbatches) are complete all the same.
            while self._next < len(self.buckets):
                self._submit(self._next)
                self._next += 1
        finally:
            self._submit = None
        if any(parameter.grad is not view for parameter, view in self._views):
            raise TrainingError(
                "the task replaced a parameter's .grad (zero_grad, perhaps): the platform owns gradients"
            )
        return works

    def scale(self, factor: float) -> None:
        """Multiplies every gradient, and what rides along, which has been read by then."""
        for bucket in self.buckets:
            bucket.mul_(factor)

    def _hook(self, bucket: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if self._submit is None:
                return
            self._check()
            self._waiting[bucket] -= 1
            while self._next < len(self._waiting) and self._waiting[self._next] == 0:
                self._submit(self._next)
                self._next += 1

        return ready


def plan_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Groups parameters, last first, into runs of one dtype and device of at most `bucket_bytes`, or one parameter."""
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in reversed(parameters):
        nbytes = parameter.numel() * parameter.element_size()
        fits = (
            groups
            and filled + nbytes <= bucket_bytes
            and groups[-1][0].dtype == parameter.dtype
            and groups[-1][0].device == parameter.device
        )
        if fits:
            groups[-1].append(parameter)
            filled += nbytes
        else:
            groups.append([parameter])
            filled = nbytes
    return groups


def square_norm(named: Sequence[tuple[str, torch.Tensor]]) -> float:
    """The sum of squares over all tensors: each tensor's in float64, added in name order."""
    return sum(
        float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
        for _, tensor in sorted(named, key=lambda pair: pair[0])
    )
