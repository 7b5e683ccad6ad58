"""Data parallelism: gradients live in flat buckets that are summed over the world while backward still runs.

Parameters fill buckets from the last to the first, the order in which backward finishes them. A bucket is submitted
once its last gradient is complete. Buckets are submitted in order, so that every worker submits alike. The idea is that
of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from raytrain_plus.collective.exact import ExactSum
from raytrain_plus.collective.world import Work, World
from raytrain_plus.device_copies import Numbers, from_host, read_together
from raytrain_plus.errors import TrainingError
from raytrain_plus.parallel.half_precision import ring_wire
from raytrain_plus.parallel.weighting import Weight
from raytrain_plus.parallel.wire import MakeWire, Named, Rider, Wire, gradient_dtype, nothing

_CPU = torch.device("cpu")
BUCKET_BYTES = 4 << 20
"""Size in bytes at which a bucket is closed: large enough for the ring's bandwidth, small enough to overlap."""
GPU_BUCKET_BYTES = 64 << 20
"""The same on a GPU, which computes this many bytes of gradients in a millisecond or less."""


class Gradients:
    """The gradients of a model's parameters, as views into buckets, and their sums over shards and workers."""

    def __init__(
        self,
        named: Named,
        bucket_bytes: int = BUCKET_BYTES,
        rider: Rider | None = None,
        make_wire: MakeWire = ring_wire,
        label: str = "",
        waits: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        """Allocate the buckets and make their views the gradients of the parameters, unless that `waits`.

        `rider` returns how many numbers of a floating-point type are summed with the first bucket. `make_wire`: how the
        buckets travel. `label` separates these sums from those of other parts of the model. `device`: where
        the rider is if there are no parameters.
        """
        self._label = label
        self._device = device
        self._waiting: list[int] = []
        self._reported: set[int] = set()
        self._submit: Callable[[int], None] | None = None
        self._next = 0
        self._check: Callable[[], None] = lambda: None
        self._views: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._wires: list[Wire] = []
        self._places: dict[int, tuple[int, int]] = {}
        """(bucket, place in the bucket) of each parameter, by its identity."""
        self._alone = False
        """Whether this worker has the gradients of all shards."""
        self._sums_of: tuple[list[Numbers], list[Numbers]] | None = None
        """After the sums: for each bucket, which parameters have a gradient, and how many values were sent as zero."""
        names = {id(parameter): name for name, parameter in named}
        planned = plan_buckets([parameter for _, parameter in named], bucket_bytes)
        if rider is not None and not planned:
            planned.append([])
        self._make_wire = make_wire
        self._rider = nothing if rider is None else rider
        self._buckets = [[(names[id(parameter)], parameter) for parameter in members] for members in planned]
        """The parameters of each bucket, by name."""
        self._given = [[0.0] * len(members) for members in planned]
        """For each bucket, whether each parameter has a gradient here: 1 or 0."""
        self._names = [name for members in self._buckets for name, _ in members]
        for index, members in enumerate(planned):
            for place, parameter in enumerate(members):
                self._places[id(parameter)] = index, place
                parameter.register_post_accumulate_grad_hook(self._hook(index, place))
        if not waits:
            self.allocate()

    def allocate(self) -> None:
        """Allocate the buckets, cleared, unless they are there, and make their views the gradients."""
        if self._wires:
            return
        for index, members in enumerate(self._buckets):
            wire = self._wire(members, nothing if index else self._rider)
            self._wires.append(wire)
            self._views += zip((parameter for _, parameter in members), wire.views, strict=True)

    def _wire(self, members: Named, rider: Rider) -> Wire:
        with self._device:
            return self._make_wire(members, rider)

    def free(self) -> None:
        """Give up the memory of the buckets; the parameters have no gradients until `allocate`."""
        for parameter, _ in self._views:
            parameter.grad = None
        self._views.clear()
        self._wires.clear()
        self._sums_of = None

    @property
    def rider(self) -> torch.Tensor:
        """Summed with the first bucket: written before the step's last backward, read when that bucket is summed."""
        return self._wires[0].rider if self._wires else torch.zeros(0)

    def ride(self, rider: Rider) -> None:
        """Have other numbers summed with the first bucket from now on; clears that bucket. Called between steps."""
        if len(self.rider) == rider(self.rider.dtype):
            return
        first, self._rider = self._buckets[0], rider
        self._wires[0] = wire = self._wire(first, rider)
        self._views[: len(first)] = zip((value for _, value in first), wire.views, strict=True)

    @property
    def exact(self) -> list[ExactSum]:
        """One sum per bucket if sums are exact, else empty."""
        return [wire.exact for wire in self._wires if wire.exact is not None]

    def begin(self, scales: Mapping[str, int]) -> None:
        """Clear what gradients there are, and the rider. `scales`: the exponents of the quanta of an exact sum."""
        for wire in self._wires:
            wire.begin(scales)
        for given in self._given:
            given[:] = [0.0] * len(given)
        self._sums_of = None

    def weigh(self, weight: Weight) -> None:
        """Have the gradients of the next backward pass count by a weight; without one they count as they are.

        Those of weight 0 must be zeros.
        """
        for wire in self._wires:
            wire.weigh(weight)

    def end_shard(self) -> None:
        """End a shard whose gradients are complete, before the next shard."""
        for wire in self._wires:
            wire.end_shard()

    def writes(self) -> list[int]:
        """Return how often the gradients of each bucket have been written."""
        return [wire.writes() for wire in self._wires]

    def check_unchanged(self, before: Sequence[int]) -> None:
        """Raise `TrainingError` if a gradient was written since `writes` returned `before`."""
        if self.writes() != before:
            raise _not_owned()

    def received(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record that these parameters have their gradients, which autograd did not accumulate itself."""
        for parameter in parameters:
            self.ready(parameter, *self._places[id(parameter)])

    @property
    def unread(self) -> list[Numbers]:
        """What `without_gradient` and `flushed` read, after the sums."""
        given, flushed = self._summed()
        return given + flushed

    def without_gradient(self) -> frozenset[str]:
        """Return the names of the parameters that no shard of the step gave a gradient; called after the sums."""
        summed, _ = self._summed()
        if self._alone:
            given = [one for of_bucket in self._given for one in of_bucket]
        elif summed:
            read_together(summed)
            given = [one for of_bucket in summed for one in of_bucket.values()]
        else:
            # The other workers come to the same result: the sums of these numbers are not zero.
            return frozenset()
        return frozenset(name for name, count in zip(self._names, given, strict=True) if not count)

    def flushed(self) -> int:
        """Return how many values of the step's sums, other than zero, were sent as zero by any worker."""
        _, flushed = self._summed()
        read_together(flushed)
        return sum(int(count) for one in flushed for count in one.values())

    def _summed(self) -> tuple[list[Numbers], list[Numbers]]:
        if self._sums_of is None:
            known = self._alone or all(all(given) for given in self._given)
            given = [] if known else [Numbers(wire.given) for wire in self._wires]
            self._sums_of = given, [Numbers(wire.flushed) for wire in self._wires if wire.flushed is not None]
        return self._sums_of

    @contextmanager
    def reducing(
        self,
        world: World,
        check: Callable[[], None] = lambda: None,
        complete: Callable[[Named], None] = lambda named: None,
    ) -> Iterator[list[Work]]:
        """Open for the step's last backward pass: submit each bucket once it is complete, the rest at the end.

        Yields the list of the work under way. `check` is called with every gradient; an error that it raises ends the
        backward pass. `complete` is called with the parameters of a bucket, by name, before it is submitted. Raises
        `TrainingError` if the task replaced a gradient by another tensor.
        """
        works: list[Work] = []
        self._alone = world.size == 1
        self._waiting = [len(wire.views) for wire in self._wires]
        self._reported.clear()
        self._next = 0
        self._check = check

        def submit(index: int) -> None:
            complete(self._buckets[index])
            given = self._wires[index].given
            if all(self._given[index]):
                # A copy from the host would make the device finish all earlier work first.
                given.fill_(1.0)
            else:
                given.copy_(from_host(torch.tensor(self._given[index], dtype=given.dtype), given.device))
            works.extend(self._wires[index].submit(world, f"gradients{self._label}.{index}"))

        self._submit = submit
        try:
            yield works
            # Parameters without a part in this backward have not reported; their zeros, or the sums of earlier
            # microbatches, are complete.
            while self._next < len(self._wires):
                submit(self._next)
                self._next += 1
        finally:
            self._submit = None
        if any(parameter.grad is not view for parameter, view in self._views):
            raise _not_owned()

    def take_means(self, weight: float) -> None:
        """Turn the sums into gradients: divide them by the weight of all shards."""
        for wire in self._wires:
            wire.take_means(weight)

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for wire in self._wires:
            wire.scale(factor)

    def _hook(self, bucket: int, place: int) -> Callable[[torch.Tensor], None]:
        # Python's collector does not see a cycle through autograd: the weights would stay in memory for ever.
        this = weakref.ref(self)

        def report(parameter: torch.Tensor) -> None:
            if (gradients := this()) is not None:
                gradients.ready(parameter, bucket, place)

        return report

    def ready(self, parameter: torch.Tensor, bucket: int, place: int) -> None:
        """Record that a parameter has its gradient, and submit its bucket if that is complete."""
        self._given[bucket][place] = 1.0
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


def _not_owned() -> TrainingError:
    return TrainingError(
        "the task replaced a parameter's .grad (perhaps by zero_grad), or changed it in place; the platform owns "
        "gradients: do not assign, clear or scale them, and call no backward() in the loss (torch.autograd.grad works)"
    )


def bucket_bytes(device: torch.device) -> int:
    """Return the size of the buckets of gradients on a device."""
    return GPU_BUCKET_BYTES if device.type == "cuda" else BUCKET_BYTES


def plan_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Group parameters, last first, into buckets of one dtype and device: at most `bucket_bytes`, or one parameter."""
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in reversed(parameters):
        dtype = gradient_dtype(parameter)
        nbytes = parameter.numel() * dtype.itemsize
        fits = (
            groups
            and filled + nbytes <= bucket_bytes
            and gradient_dtype(groups[-1][0]) == dtype
            and groups[-1][0].device == parameter.device
        )
        if fits:
            groups[-1].append(parameter)
            filled += nbytes
        else:
            groups.append([parameter])
            filled = nbytes
    return groups
