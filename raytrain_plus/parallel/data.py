"""Data parallelism: gradients live in flat buckets that are summed over the world while backward still runs.

Parameters fill buckets from the last to the first, the order in which backward finishes them. A bucket is submitted
once its last gradient is complete. Buckets are submitted in order, so that every worker submits alike. The idea is that
of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from raytrain_plus.collective.exact import ExactSum
from raytrain_plus.collective.world import Work, World
from raytrain_plus.errors import TrainingError

BUCKET_BYTES = 4 << 20
"""Size in bytes at which a bucket is closed: large enough for the ring's bandwidth, small enough to overlap."""


class Gradients:
    """The gradients of a model's parameters, as views into flat buckets, and their sums over shards and workers.

    The bucket itself is reduced, to which every shard's backward has added. For an exact sum, a vector beside it is
    reduced, to which each shard's gradients are added after rounding.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        bucket_bytes: int = BUCKET_BYTES,
        rider: Callable[[torch.dtype], int] | None = None,
        exact_shards: int | None = None,
        label: str = "",
    ) -> None:
        """Allocate the buckets and make their views the gradients of the parameters.

        `rider` returns how many numbers of a floating-point type are summed with the first bucket. With `exact_shards`,
        the job's number of shards, sums are exact: the same bits in any order. `label` separates these sums from those
        of other parts of the model.
        """
        self.buckets: list[torch.Tensor] = []
        self.exact: list[ExactSum] = []
        """One sum per bucket if sums are exact, else empty."""
        self.rider = torch.zeros(0)
        """Summed with the first bucket: written before the step's last backward, read when that bucket is summed."""
        self._label = label
        self._waiting: list[int] = []
        self._reported: set[int] = set()
        self._groups: list[list[torch.Tensor]] = []
        self._submit: Callable[[int], None] | None = None
        self._next = 0
        self._check: Callable[[], None] = lambda: None
        self._views: list[tuple[nn.Parameter, torch.Tensor]] = []
        names = {id(parameter): name for name, parameter in named}
        planned = plan_buckets([parameter for _, parameter in named], bucket_bytes)
        if rider is not None and not (planned and planned[0][0].dtype.is_floating_point):
            planned.insert(0, [])
        for index, members in enumerate(planned):
            like = members[0] if members else torch.zeros(0)
            dtype = like.dtype if exact_shards is None else torch.float64
            riding = rider(dtype) if rider is not None and index == 0 else 0
            own = sum(parameter.numel() for parameter in members)
            flat = torch.zeros(own + (riding if exact_shards is None else 0), dtype=like.dtype, device=like.device)
            group: list[torch.Tensor] = []
            for parameter in members:
                at = sum(view.numel() for view in group)
                parameter.grad = view = flat[at : at + parameter.numel()].view_as(parameter)
                group.append(view)
                self._views.append((parameter, view))
                parameter.register_post_accumulate_grad_hook(self._hook(index))
            if exact_shards is not None:
                sizes = {names[id(parameter)]: parameter.numel() for parameter in members}
                self.exact.append(ExactSum(sizes, exact_shards, like.device, riding))
            if riding:
                self.rider = self.exact[0].rider if self.exact else flat[own:]
            self.buckets.append(flat)
            self._groups.append(group)

    def begin(self, scales: Mapping[str, int]) -> None:
        """Clear every gradient and the rider. `scales`: the exponents of the quanta of an exact sum."""
        for bucket in self.buckets:
            bucket.zero_()
        for exact in self.exact:
            exact.begin(scales)

    def end_shard(self) -> None:
        """End a shard whose gradients are complete, before the next shard."""
        for index, exact in enumerate(self.exact):
            exact.add(self._groups[index])
            self.buckets[index].zero_()

    def reduce_during(
        self, backward: Callable[[], None], world: World, check: Callable[[], None] = lambda: None
    ) -> list[Work]:
        """Run the step's last backward and submit each bucket once it is complete; return the work under way.

        `check` is called with every gradient; an error that it raises ends the backward. Raises `TrainingError` if the
        task replaced a gradient by another tensor.
        """
        works: list[Work] = []
        self._waiting = [len(group) for group in self._groups]
        self._reported.clear()
        self._next = 0
        self._check = check

        def submit(index: int) -> None:
            if self.exact:
                self.exact[index].add(self._groups[index])
            wire = self.exact[index].wire if self.exact else self.buckets[index]
            works.append(world.reduce(wire, f"gradients{self._label}.{index}"))

        self._submit = submit
        try:
            backward()
            # Parameters without a part in this backward have not reported; their zeros, or the sums of earlier
            # microbatches, are complete.
            while self._next < len(self.buckets):
                submit(self._next)
                self._next += 1
        finally:
            self._submit = None
        if any(parameter.grad is not view for parameter, view in self._views):
            raise TrainingError(
                "the task replaced a parameter's .grad (perhaps by zero_grad); the platform owns gradients: do not "
                "assign or clear them"
            )
        return works

    def take_means(self, weight: float) -> None:
        """Turn the sums into gradients: divide them by the weight of all shards."""
        if not self.exact:
            self.scale(1.0 / weight)
        for group, exact in zip(self._groups, self.exact, strict=False):
            for view, total in zip(group, exact.sums, strict=True):
                # A sum can exceed the range of the gradient's dtype although its mean does not; only this copy rounds
                # to that dtype.
                view.copy_(total.div_(weight).view_as(view))

    def scale(self, factor: float) -> None:
        """Multiply every gradient, and the rider, which has been read by then."""
        for bucket in self.buckets:
            bucket.mul_(factor)

    def _hook(self, bucket: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if self._submit is None:
                return
            self._check()
            if id(parameter) in self._reported:
                raise TrainingError(
                    "a parameter's gradient was accumulated twice in one backward pass; activation checkpointing does "
                    "this for layers that share weights: pass use_reentrant=False to torch.utils.checkpoint"
                )
            self._reported.add(id(parameter))
            self._waiting[bucket] -= 1
            while self._next < len(self._waiting) and self._waiting[self._next] == 0:
                self._submit(self._next)
                self._next += 1

        return ready


def plan_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Group parameters, last first, into buckets of one dtype and device: at most `bucket_bytes`, or one parameter."""
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
